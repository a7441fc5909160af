"""A vLLM engine in this process, whose steps tests compare with `BPCLayer`."""

import contextlib
import copy
import os
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
pytest.importorskip("vllm.entrypoints.llm")  # it silences what vLLM's modules say of torch

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import bpc_artifacts
from bpc_calib import BPCCache, calibrate, make_plan
from bpc_calib.calibration.needs import joined, text_needs
from bpc_calib.demo import DEMO_MODEL
from bpc_calib.method.state import Rows, read_tokens
from bpc_calib.models.description import describe
from bpc_calib.serving.packing import unpacked_keys
from bpc_calib.serving.plugin import register

# Every engine replaces Triton's kernels by others, for which vLLM looks through all modules. Once is enough.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # it reads names that torch will drop
    current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)

SETTINGS = {"budget": 0.02, "min_tokens": 8, "min_context": 0}
DENSE = {"min_context": 10**9}
PAGE = 128  # tokens
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}


def made_artifact(model_folder, target, samples=4, needs=False):
    """Projections of a model, from a little of the demo's text; with `needs` its KV heads have shares of their own."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    plan = make_plan(describe(model.config), samples=samples, sequence_length=256)
    text = AutoTokenizer.from_pretrained(model_folder) if model_folder == DEMO_MODEL else tiny.tokenizer()
    artifact = calibrate(model, text, ["demo-prose"], plan)
    if needs:
        artifact = joined(artifact, [400], [text_needs(model, artifact, torch.tensor(ids(400)))])
    bpc_artifacts.save(artifact, target)
    return target


class Engine:
    """A vLLM engine in this process whose options can change between runs; `backend` in place of the CPU's own."""

    def __init__(self, model, artifact, *, backend=None, **arguments):
        self.model, self.artifact = model, artifact
        load_general_plugins()  # once in a process: so that no engine registers again what it finds
        register()
        if backend is not None:
            register_backend(AttentionBackendEnum.CPU_ATTN, backend)
        selector._cached_get_attn_backend.cache_clear()  # of an earlier engine
        self.llm = LLM(
            str(model), distributed_executor_backend="uni", enforce_eager=True, dtype="float32", max_num_seqs=8,
            skip_tokenizer_init=True, block_size=PAGE,
            additional_config={"bpc": {"artifact": str(artifact)} | SETTINGS},
            **({"max_num_batched_tokens": 256, "max_model_len": 2048} | arguments),
        )  # fmt: skip
        self.config = self.llm.llm_engine.vllm_config
        self.core = self.llm.llm_engine.engine_core.engine_core

    def attention(self):
        """vLLM's attention layers."""
        layers = self.config.compilation_config.static_forward_context.values()
        return [layer for layer in layers if hasattr(layer, "impl")]

    def use(self, **options):
        """Change the options, and forget cached prompts."""
        self.config.additional_config["bpc"] = {"artifact": str(self.artifact)} | SETTINGS | options
        self.llm.reset_prefix_cache()

    def generate(self, *prompts, new=12):
        """The answers, and how many tokens of each prompt were cached."""
        asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        made = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in made], [each.num_cached_tokens for each in made]

    def drafts(self):
        """How many drafts were verified so far, of how many tokens, and how many of these were accepted."""
        found = {each.name: each.value for each in self.llm.get_metrics() if hasattr(each, "value")}
        return [found[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens")]

    @contextlib.contextmanager
    def checked(self, monkeypatch):
        """Compare what every sparse row chooses with `BPCLayer`; count rows, newest keys that steps hash, and steps."""
        counted = SimpleNamespace(rows=0, newest=0, steps=0, together=0)
        layers = self.config.compilation_config.static_forward_context
        kind = type(next(layer.impl for layer in self.attention() if getattr(layer.impl, "codebook", None)))
        attend, config = kind.attend, AutoConfig.from_pretrained(self.model)
        fresh = BPCCache(config, bpc_artifacts.load(self.artifact), **SETTINGS, dense_layers=()).layers
        names = {id(layer.impl): extract_layer_index(name) for name, layer in layers.items() if hasattr(layer, "impl")}

        def compared(attention, query, state, rows, newest, out):
            out, chosen = attend(attention, query, state, rows, newest, out)
            for row, length in enumerate(rows.lengths.tolist()):
                every = torch.arange(length).expand(1, query.shape[1], -1)
                keys, values = read_tokens(state, replace(rows, block_table=rows.block_table[row : row + 1]), every)
                if state.copied:
                    cache, _, keys_at = attention.over
                    slots = (rows.block_table[row].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
                    assert torch.equal(keys, unpacked_keys(cache, keys_at, slots))
                layer = copy.deepcopy(fresh[names[id(attention)]])
                layer.update(keys, values)
                layer.scale(attention.scale)
                k = max(layer.counts(length))
                assert tuple(rows.k[row].tolist()) == layer.counts(length)
                assert k <= rows.width <= rows.longest
                own, wanted = layer.decode(
                    query[row : row + 1], Rows(rows.lengths[row : row + 1], rows.k[row : row + 1], length, k)
                )
                assert torch.equal(chosen[row : row + 1, :, :k], wanted)
                assert (chosen[row, :, k:] == -1).all()
                torch.testing.assert_close(out[row].view(own.shape), own, rtol=1e-4, atol=1e-4)
            counted.rows += len(rows.k)
            counted.newest += 0 if newest is None else len(newest)
            counted.steps += 1
            counted.together = max(counted.together, len(rows.k))
            return out, chosen

        monkeypatch.setattr(kind, "attend", compared)
        yield counted


def ids(length, seed=0, vocabulary=800):
    return torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
