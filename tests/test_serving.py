"""BPC inside vLLM, in this process: what each decoding step chooses is what `BPCLayer` chooses from the same keys.

Needs vLLM (`make test-vllm`). Every test but the first runs the bundled model in float32.
"""

import contextlib
import copy
import gc
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch

pytest.importorskip("vllm")

from serving_engine import DENSE, N_GRAMS, PAGE, SETTINGS, Engine, ids, made_artifact
from vllm import SamplingParams
from vllm import _custom_ops as ops
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from bpc_calib import BPCError, InputError
from bpc_calib.demo import DEMO_MODEL
from bpc_calib.models.description import describe, first_head
from bpc_calib.serving import attention, layer
from bpc_calib.serving.options import Options, read_options
from bpc_calib.serving.packing import packing, unpacked_keys
from bpc_calib.serving.plugin import supported


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return made_artifact(DEMO_MODEL, tmp_path_factory.mktemp("artifact") / "demo.safetensors", needs=True)


@pytest.fixture(scope="module")
def engine(artifact):
    return Engine(DEMO_MODEL, artifact, num_gpu_blocks_override=40)


@pytest.fixture(scope="module")
def drafting(artifact):
    options = {"speculative_config": N_GRAMS, "disable_log_stats": False}
    return Engine(DEMO_MODEL, artifact, num_gpu_blocks_override=40, **options)


@pytest.fixture(autouse=True)
def fresh(request):
    for name in {"engine", "drafting"}.intersection(request.fixturenames):
        request.getfixturevalue(name).use()


def test_without_options_vllm_is_stock(engine):
    with set_current_vllm_config(replace(engine.config, additional_config={})):
        assert attention.CPUBackend.get_impl_cls() is CPUAttentionBackendImpl
    with set_current_vllm_config(engine.config):
        assert attention.CPUBackend.get_impl_cls() is attention.CPUAttention


def every_step(common, counts):
    """In the place of `choosing`: every decoding step, also one that attends to everything."""
    one = common.query_start_loc_cpu.diff()[: len(counts)] == 1
    return (one & ~common.is_prefilling[: len(counts)]).numpy()


def test_the_sparse_path_over_all_tokens_is_dense(engine, monkeypatch):
    prompts, rows = [ids(length, seed=length) for length in (900, 140, 1500)], []
    engine.use(**DENSE)
    dense, _ = engine.generate(*prompts)
    engine.use(budget=1.0)
    attend = attention.CPUAttention.attend

    def counted(own, query, *arguments):
        rows.append(len(query))
        return attend(own, query, *arguments)

    monkeypatch.setattr(attention.CPUAttention, "attend", counted)
    monkeypatch.setattr(attention, "choosing", every_step)
    assert engine.generate(*prompts)[0] == dense
    assert sum(rows) == 3 * 11 * 4
    assert max(rows) == 3


def test_short_requests_stay_vllms_own_unless_asked_for(engine, monkeypatch):
    prompts = [ids(400), ids(140, seed=1)]
    engine.use(**DENSE)
    dense, _ = engine.generate(*prompts)
    engine.use(min_context=None)
    with engine.checked(monkeypatch) as counted:
        assert engine.generate(*prompts)[0] == dense
    assert not counted.rows
    engine.use()
    with engine.checked(monkeypatch) as counted:
        engine.generate(*prompts)
    assert counted.rows


def test_tokens_are_hashed_by_the_first_step_that_chooses_among_them(engine, monkeypatch):
    prompt, hashed = ids(900), []
    backend = next(layer.impl.backend for layer in engine.attention() if layer.impl.codebook)
    append = backend.append

    def counted(state, codebook, key, value, at):
        hashed.append(len(at))
        append(state, codebook, key, value, at)

    monkeypatch.setattr(backend, "append", counted)
    engine.use(**DENSE)
    engine.generate(prompt)
    assert not hashed
    engine.config.additional_config["bpc"] |= SETTINGS  # the prompt stays cached, without codes
    with engine.checked(monkeypatch) as rows:
        _, (cached,) = engine.generate(prompt)
        assert cached == 900 // PAGE * PAGE
        assert rows.rows == 11 * 4
        assert (max(hashed), sum(hashed), rows.newest) == (900, 4 * 900, 4 * 11)
        hashed.clear()
        engine.generate(prompt, ids(900) + ids(40, seed=2))  # of the first only what is not in whole cached pages
        tails = 900 % PAGE, 900 % PAGE + 40
        assert (sum(hashed), rows.newest) == (4 * sum(tails), 4 * 3 * 11)


def test_five_requests_at_once_choose_what_the_layer_chooses(engine, monkeypatch):
    """Prompts go in by chunks of at most 256 tokens, so decoding steps and chunks share passes."""
    prompts = [ids(length, seed=length) for length in (900, 140, 1500, 300, 650)]
    with engine.checked(monkeypatch) as counted:
        engine.generate(*prompts)
    assert counted.together == 5
    assert counted.rows == 5 * 11 * 4  # the first token comes from the prefill


def test_a_cached_prompt_keeps_its_codes(engine, monkeypatch):
    prompt = ids(900)
    with engine.checked(monkeypatch) as counted:
        (first,), (none,) = engine.generate(prompt)
        (second,), (cached,) = engine.generate(prompt)
    assert none == 0
    assert cached == 900 // PAGE * PAGE
    assert first == second
    assert counted.rows == 2 * 11 * 4


def test_preempted_requests_go_on(engine, monkeypatch):
    """Three prompts fill 37 of 39 pages, and each answer needs one more: the first asks last, and finds none left."""
    preempted, preempt = [], Scheduler._preempt_request

    def counting(*arguments, **more):
        preempted.append(1)
        return preempt(*arguments, **more)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    prompts = [ids(length, seed=length) for length in (13 * PAGE - 40, 12 * PAGE - 4, 12 * PAGE - 5)]
    with engine.checked(monkeypatch) as counted:
        answers, _ = engine.generate(*prompts, new=60)
    assert preempted
    assert [len(answer) for answer in answers] == [60] * 3
    assert counted.together == 3


def test_requests_join_and_leave(engine, monkeypatch):
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    inner, finished = engine.llm.llm_engine, {}
    with engine.checked(monkeypatch) as counted:
        for step in range(60):
            if step in (0, 5, 9):
                inner.add_request(f"request {step}", {"prompt_token_ids": ids(700 + step, seed=step)}, asked)
            if step == 16:
                inner.abort_request(["request 5"])
            for each in inner.step():
                if each.finished:
                    finished[each.request_id] = list(each.outputs[0].token_ids)
    assert [len(answer) for answer in finished.values() if len(answer) == 20] == [20, 20]
    assert counted.together == 3


def test_full_attention_verifies_drafts(engine, drafting):
    """In this text every step verifies drafts, so a budget of 2 % changes nothing."""
    prompt, new = ids(900), 40
    (sparse,), _ = engine.generate(prompt, new=new)
    engine.use(**DENSE)
    (dense,), _ = engine.generate(prompt, new=new)
    assert sparse != dense
    for options in ({}, DENSE):
        drafting.use(**options)
        before = drafting.drafts()
        assert drafting.generate(prompt, new=new)[0] == [dense]
        drafts, offered, accepted = (now - then for now, then in zip(drafting.drafts(), before, strict=True))
        assert 0 < accepted < offered
        assert drafts + accepted >= new - 1  # the first token comes from the prefill


def test_between_drafts_steps_choose_what_the_layer_chooses(drafting, monkeypatch):
    """Tokens of drafts that were rejected leave their slots to others, whose codes must be their own."""
    before = drafting.drafts()
    with drafting.checked(monkeypatch) as counted:
        drafting.generate(*(ids(length, seed=length) for length in (900, 140, 300)), new=20)
    drafts, offered, accepted = (now - then for now, then in zip(drafting.drafts(), before, strict=True))
    assert 0 < accepted < offered
    assert counted.together > 1
    least = 4 * (3 * 19 - drafts - accepted)  # all but what verification wrote; the end of an answer may cut 3 tokens
    assert 0 < least <= counted.rows <= least + 4 * 3 * 3


@pytest.mark.slow
def test_200_requests_come_and_go(engine, monkeypatch):
    """Of random lengths, a fifth of them cancelled, in a cache too small for all; memory grows as vLLM's own."""
    drawn, inner, finished, left, used = random.Random(0), engine.llm.llm_engine, 0, {}, []
    shared = ids(2 * PAGE, seed=1)
    with engine.checked(monkeypatch) as counted:
        number = 0
        while number < 200 or inner.has_unfinished_requests():
            if number < 200 and drawn.random() < 0.3:
                length, new = drawn.randint(3, 900), drawn.randint(1, 40)
                prompt = (shared if drawn.random() < 0.5 else []) + ids(length, seed=number)
                asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
                inner.add_request(str(number), {"prompt_token_ids": prompt}, asked)
                left[str(number)] = new
                number += 1
                if number in (100, 200):
                    gc.collect()
                    used.append(resident_bytes())
            if left and drawn.random() < 0.03:
                cancelled = drawn.choice(sorted(left))
                inner.abort_request([cancelled])
                del left[cancelled]
            for each in inner.step():
                if each.finished and each.request_id in left:
                    assert len(each.outputs[0].token_ids) == left.pop(each.request_id)
                    finished += 1
    assert not left
    assert finished > 120
    assert counted.together >= 4
    assert counted.rows > 1000
    assert used[1] < 1.1 * used[0]  # stock vLLM grows by 9 % there, by 1 % after 1,000 requests


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def healthy(port):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200


def test_the_command_serves(artifact, tmp_path):
    """`bpc serve` answers over HTTP; vLLM's own options pass through."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "-m", "demo", "-a", artifact, "--min-tokens", 8, "--port", port, "--max-model-len", 512]
    start = [sys.executable, "-c", "from bpc_cli.main import main; main()", *map(str, words), "--dtype", "float32"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(start, stdout=log, stderr=log, env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"})
        try:
            end = time.monotonic() + 600  # it compiles the model: a minute on two cores
            while not healthy(port):
                said = (tmp_path / "log").read_text()[-2000:]
                assert server.poll() is None, said
                assert time.monotonic() < end, said
                time.sleep(1)
            body = {"model": "demo", "prompt": ids(200), "max_tokens": 5, "ignore_eos": True}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            answer = json.loads(urllib.request.urlopen(request, timeout=300).read())
        finally:
            server.terminate()
            server.wait(300)
        said = (tmp_path / "log").read_text()
    assert answer["usage"]["completion_tokens"] == 5
    assert re.search(
        r"BPC chooses in 4 of 4 layers: .* 2 % of the cached tokens, at least to 8, from [0-9,]+ tokens", said
    )


def test_a_mistake_in_an_option_of_vllm_is_one_line(artifact):
    """vLLM itself would print all its options first."""
    start = [sys.executable, "-c", "from bpc_cli.main import main; main()", "serve", "-m", "demo", "-a", str(artifact)]
    said = subprocess.run([*start, "--budgt", "3"], capture_output=True, text=True, timeout=300)
    assert said.returncode == 2
    *others, last = said.stderr.splitlines()
    assert last == "Error: vLLM: unrecognized arguments: --budgt (Possible options: --budget, --uds)"
    assert len(others) <= 2


RANKS = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, artifact, asked = sys.argv[1:]
    llm = LLM(
        model, tensor_parallel_size=2, dtype="float32", max_model_len=2048, enforce_eager=True, max_num_seqs=8,
        max_num_batched_tokens=256, block_size=128, skip_tokenizer_init=True,
        additional_config={"bpc": {"artifact": artifact} | json.loads(asked)},
    )
    asked = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.stdin.read())]
    print("answers", json.dumps([list(each.outputs[0].token_ids) for each in llm.generate(prompts, asked)]))
"""


@pytest.mark.slow
def test_two_ranks_answer_as_one(engine, tmp_path):
    """Each has half of the KV heads, and their projections."""
    script, prompts = tmp_path / "ranks.py", [ids(length, seed=length) for length in (900, 140, 1500)]
    script.write_text(RANKS)
    words = [sys.executable, script, DEMO_MODEL, engine.artifact, json.dumps(SETTINGS)]
    ran = subprocess.run(
        list(map(str, words)), input=json.dumps(prompts), capture_output=True, text=True, check=True, timeout=600,
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )  # fmt: skip
    one, _ = engine.generate(*prompts, new=24)
    assert json.loads(re.search(r"answers (.*)", ran.stdout)[1]) == one
    engine.use(budget=1.0)
    assert engine.generate(*prompts, new=24)[0] != one  # the budget matters


@pytest.mark.slow
def test_the_benchmark_runs(artifact, tmp_path):
    script, target = Path(__file__).parent.parent / "benchmarks" / "serving.py", tmp_path / "result.json"
    words = [sys.executable, script, "--tiny", "-a", artifact, "-o", target]
    subprocess.run(words, check=True, timeout=900)
    rows = json.loads(target.read_text())["rows"]
    assert [row["server"] for row in rows] == ["stock", "BPC"]
    assert rows[1]["same_answers"] == 2  # so short a prompt is attended to by vLLM alone


def test_a_model_that_drafts_leaves_no_step_that_chooses(engine, artifact, monkeypatch):
    said, prompt = [], ids(400)
    engine.use(**DENSE)
    dense, _ = engine.generate(prompt)
    for level in ("info", "warning"):
        monkeypatch.setattr(layer.logger, level, lambda text, *values: said.append(text % values))
    drafts = {"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": 3}
    drafting = Engine(DEMO_MODEL, artifact, num_gpu_blocks_override=40, speculative_config=drafts)
    assert len(said) == 2  # nothing of the drafting model's layers
    assert said[0].startswith("BPC chooses in 4 of 4 layers")
    assert said[1].startswith("BPC chooses in no step that verifies drafts")
    with drafting.checked(monkeypatch) as counted:
        answer, _ = drafting.generate(prompt)
    assert not counted.rows
    assert answer == dense


@pytest.mark.parametrize("options", [{}, {"disable_hybrid_kv_cache_manager": True}], ids=["managed", "unified"])
def test_a_model_with_sliding_layers_keeps_codes_behind_its_pages(options, tmp_path, monkeypatch):
    """vLLM frees the pages of layer 0 behind its window, for any layer to use, and puts page 0 in their place."""
    folder = tiny.save(tmp_path / "model", "gemma3_text", head_dim=64, sliding_window=256, max_position_embeddings=2048)
    engine = Engine(folder, made_artifact(folder, tmp_path / "gemma.safetensors", samples=6), **options)
    chosen = [each.impl for each in engine.attention() if each.impl.codebook]
    assert len(chosen) == 1  # layer 0 slides, layer 1 is dense by default
    assert chosen[0].cache is None
    groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
    frees = [isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in groups]
    assert frees == ([False] if options else [True, False, False])  # "unified": all layers keep all of their pages
    with engine.checked(monkeypatch) as counted:
        first, _ = engine.generate(ids(900, vocabulary=250), ids(400, 1, vocabulary=250))
        second, cached = engine.generate(ids(900, vocabulary=250))
    assert counted.rows == 3 * 11
    assert cached[0] > 0
    assert second[0] == first[0]


REAL = Path(__file__).parent.parent / "build" / "real"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["SmolLM2-135M-Instruct", "gemma-3-270m"])
def test_models_trained_by_others(model, monkeypatch):
    """Five requests at once choose what the layer chooses; all tokens through the sparse path answer as vLLM alone."""
    artifact = REAL / f"{model}-bpc.safetensors"
    if not artifact.exists():
        pytest.skip("make real fetches the model and makes its projections")
    engine = Engine(REAL / model, artifact)
    prompts = [ids(length, seed=length, vocabulary=40000) for length in (900, 140, 1500, 300, 650)]
    with engine.checked(monkeypatch) as counted:
        engine.generate(*prompts)
    assert counted.together == 5
    chosen = sum(layer.impl.codebook is not None for layer in engine.attention())
    assert counted.rows == 5 * 11 * chosen
    monkeypatch.undo()
    engine.use(**DENSE)
    dense, _ = engine.generate(*prompts)
    engine.use(budget=1.0)
    monkeypatch.setattr(attention, "choosing", every_step)
    assert engine.generate(*prompts)[0] == dense


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "additional_config.bpc needs an artifact: the file that bpc calibrate wrote"),
        ({"artifact": "a", "bugdet": 1}, "additional_config.bpc has no 'bugdet'; it has artifact, budget, min_tokens"),
        ({"artifact": "online"}, "must be a file that bpc calibrate wrote: requests share cached prompts"),
        ({"artifact": None}, "must be a file that bpc calibrate wrote"),
    ],
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        read_options(SimpleNamespace(additional_config={"bpc": given}))


def test_what_bpc_cannot_serve_is_refused(engine, tmp_path, monkeypatch):
    def refused(config, **options):
        asked = Options(**({"artifact": str(engine.artifact)} | SETTINGS | options))
        with pytest.raises(BPCError) as caught:
            layer.check(config, asked)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    other = tiny.artifact(tiny.config("llama"))
    assert "budget must be a share in (0, 1]" in refused(engine.config, budget=2.0)
    assert "equal_shares must be True or False, not 'false'" in refused(engine.config, equal_shares="false")
    assert "min_context must be an integer" in refused(engine.config, min_context=False)
    assert "min_tokens must be an integer" in refused(engine.config, min_tokens=0)
    assert "dense_layers: 9 is not a layer of demo" in refused(engine.config, dense_layers=(9,))
    assert "leave BPC no layer" in refused(engine.config, dense_layers=(0, 1, 2, 3))
    assert "missing.safetensors" in refused(engine.config, artifact=str(tmp_path / "missing.safetensors"))
    fp8 = replace(engine.config, cache_config=replace(engine.config.cache_config, cache_dtype="fp8"))
    with set_current_vllm_config(fp8), pytest.raises(BPCError, match="BPC on a CPU does not serve FP8 caches"):
        attention.CPUBackend.get_impl_cls()
    split = replace(engine.config.parallel_config)
    split.decode_context_parallel_size = 2
    parts = SimpleNamespace(model_config=engine.config.model_config, parallel_config=split)
    assert "contexts split over ranks" in refused(parts)
    moved = copy.copy(engine.config)
    moved.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert "KV connectors, which move no codes: leave out --kv-transfer-config" in refused(moved)
    assert other.layers
    impl = next(each.impl for each in engine.attention() if each.impl.codebook)
    for name, value, message in (
        ("logits_soft_cap", 30.0, "a soft cap on the logits"),
        ("alibi_slopes", torch.ones(4), "ALiBi"),
        ("sinks", torch.ones(4), "attention sinks"),
        ("kv_sharing_target_layer_name", "model.layers.0", "keys shared with another layer"),
    ):
        before = getattr(impl, name)
        setattr(impl, name, value)
        with pytest.raises(BPCError, match=f"model.layers.2 has {message}, which BPC does not serve"):
            impl.check("model.layers.2")
        setattr(impl, name, before)
    monkeypatch.setattr(impl, "sliding_window", 2048)
    with pytest.raises(BPCError, match="a sliding window as long as the model"):
        impl.check("model.layers.2")
    kinds = ["linear_attention", *describe(engine.config.model_config.hf_config).layer_types[1:]]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "describe", lambda config: SimpleNamespace(layer_types=kinds))
        assert "layers of linear attention" in refused(engine.config)


@pytest.mark.parametrize("size", [16, 4096, 8192])
def test_where_the_numbers_of_a_page_lie(size):
    """Of pages with more tokens than 12 bits count, too."""
    isa = _get_attn_isa(torch.float32, size, 64)
    places = torch.cat(packing(isa, size, 64, torch.float32)).flatten()
    assert torch.equal(places.sort().values, torch.arange(2 * size * 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_are_read_as_vllm_wrote_them(dtype):
    """In any order, some pages in part; with AMX pairs of numbers lie together."""
    isa, slots = _get_attn_isa(dtype, PAGE, 64), torch.tensor([3, 3 * PAGE + 60, 5, PAGE, 2 * PAGE - 1, 4, 0, 3 * PAGE])
    cache, (key, value) = torch.zeros(4, 3, PAGE, 128, dtype=dtype), torch.randn(2, len(slots), 3, 64).to(dtype)
    ops.cpu_attn_reshape_and_cache(key, value, *cache.view(4, 3, 2 * PAGE, 64).chunk(2, 2), slots, isa)
    found = unpacked_keys(cache, packing(isa, PAGE, 64, dtype)[0], slots)
    assert torch.equal(found[0].transpose(0, 1), key)


def test_the_artifact_of_another_model_stops_the_start(artifact, tmp_path):
    folder = tiny.save(tmp_path / "model", head_dim=64, max_position_embeddings=2048)
    with pytest.raises(Exception, match="does not fit"):
        Engine(folder, artifact)


def test_versions():
    assert supported("0.32.0")
    assert supported("0.32.1.dev3+cpu")
    assert not supported("0.33.0")
    assert not supported("0.3.2")


@pytest.mark.parametrize(("total", "ranks", "first"), [(8, 2, [0, 4]), (8, 1, [0]), (2, 4, [0, 0, 1, 1])])
def test_ranks_take_their_heads_as_vllm_shards_them(total, ranks, first):
    assert [first_head(total, rank, ranks) for rank in range(ranks)] == first
