"""Decode one prompt greedily with one engine, and print its times as JSON: the process that `other_engines.py` starts.

    python benchmarks/engine_run.py ENGINE REQUEST.json

The interpreter needs the engine alone; only the engine "bpc" needs this project. The time to the first token is that of
the prefill; all that comes later, such as hashing the prompt, belongs to decoding.
"""

import importlib.metadata
import inspect
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["ENGINES"]

Request = dict[str, Any]  # model, gguf, artifact, prompts (lists of token ids), new, threads, repeats
Run = Callable[[list[int], int], Iterator[int]]  # from a prompt and the number of new tokens to these, one by one


def main() -> None:
    name, request = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    package, prepare = ENGINES[name]
    os.environ["OMP_NUM_THREADS"] = str(request["threads"])
    began = time.perf_counter()
    run = prepare(request)
    list(run(request["prompts"][0][:64], 4))  # compiles, allocates
    ready = time.perf_counter() - began
    rows = [measured(run, prompt, request["new"], request["repeats"]) for prompt in request["prompts"]]
    facts = {"engine": name, "version": importlib.metadata.version(package), "start_seconds": round(ready, 1)}
    facts["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print("\n" + json.dumps(facts | {"rows": rows}))


def measured(run: Run, prompt: list[int], new: int, repeats: int) -> dict[str, Any]:
    """Medians over the repeats: seconds to the first token, and tokens per second after it."""
    firsts: list[float] = []
    rests: list[float] = []
    tokens: list[int] = []
    for _ in range(repeats):
        began = time.perf_counter()
        tokens = []
        for token in run(prompt, new):
            tokens.append(token)
            if len(tokens) == 1:
                firsts.append(time.perf_counter() - began)
        rests.append(time.perf_counter() - began - firsts[-1])
    first, rest = median(firsts), median(rests)
    row = {"prompt": len(prompt), "new": len(tokens), "first_token_seconds": round(first, 3)}
    row |= {"prefill_tokens_per_second": round(len(prompt) / first, 1)}
    return row | {"decode_tokens_per_second": round((len(tokens) - 1) / rest, 2), "tokens": tokens}


def transformers_engine(request: Request, make_cache: Callable[[Any], Any] | None = None) -> Run:
    """The model's own cache and torch's SDPA, unless a function makes another cache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(request["threads"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16).eval()
    if make_cache is not None:
        import bpc_calib

        bpc_calib.enable(model)

    def run(prompt: list[int], new: int) -> Iterator[int]:
        cache = DynamicCache(config=model.config) if make_cache is None else make_cache(model.config)
        taken = inspect.signature(model.prepare_inputs_for_generation).parameters
        held = {"cache" if "cache" in taken else "past_key_values": cache}
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(new):
                ids = model(ids, **held, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
                yield int(ids)

    return run


def bpc_engine(request: Request) -> Run:
    """BPC as `bpc generate` decodes."""
    import bpc_artifacts
    import bpc_calib

    artifact = bpc_artifacts.load(request["artifact"])
    return transformers_engine(request, lambda config: bpc_calib.BPCCache(config, artifact))


def llama_cpp_engine(request: Request) -> Run:
    """llama.cpp with flash attention, its keys and values in 16 bits."""
    import numpy as np
    from llama_cpp import Llama

    longest, threads = max(map(len, request["prompts"])), request["threads"]
    llama = Llama(
        request["gguf"], n_ctx=longest + request["new"], n_batch=2048, n_threads=threads, n_threads_batch=threads,
        flash_attn=True, verbose=False,
    )  # fmt: skip

    def step(ids: list[int]) -> int:
        llama.eval(ids)
        return int(np.argmax(np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),))))

    def run(prompt: list[int], new: int) -> Iterator[int]:
        llama.reset()
        ids = prompt
        for _ in range(new):
            ids = [step(ids)]
            yield ids[0]

    return run


def vllm_engine(request: Request) -> Run:
    """vLLM with its defaults, but that no prefix is cached: every repeat computes the whole prompt."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    longest = max(map(len, request["prompts"]))
    llm = LLM(
        request["model"], dtype="bfloat16", max_model_len=longest + request["new"], max_num_seqs=1,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    number = iter(range(1 << 30))

    def run(prompt: list[int], new: int) -> Iterator[int]:
        kind = RequestOutputKind.DELTA
        wanted = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=kind)
        llm.llm_engine.add_request(str(next(number)), {"prompt_token_ids": prompt}, wanted)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                yield from output.outputs[0].token_ids

    return run


# By name: the package that must be there, and the function that loads the model.
ENGINES: dict[str, tuple[str, Callable[[Request], Run]]] = {
    "transformers": ("transformers", transformers_engine),
    "bpc": ("bpc-calib", bpc_engine),
    "llama.cpp": ("llama-cpp-python", llama_cpp_engine),
    "vllm": ("vllm-cpu", vllm_engine),
}


if __name__ == "__main__":
    main()
