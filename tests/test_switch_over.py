"""Where sparse steps begin: the length, and caches that reach it while they decode."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import DynamicCache

from bpc_calib import BPCCache, enable
from bpc_calib.backends.cpu import backend as kernels
from bpc_calib.backends.dispatch import backend
from bpc_calib.backends.switch_over import IN_TRANSFORMERS, ON_X86, in_vllm, sparse_from
from bpc_calib.compat import is_x86, with_cache
from bpc_calib.evaluation.comparison import make_cache
from bpc_calib.evaluation.fidelity import probe
from bpc_calib.evaluation.forcing import prefill
from bpc_calib.models.long_passes import slow_products
from bpc_calib.runtime.layers import GrowingLayer, costs_of, own_from

CPU = torch.device("cpu")
LLAMA = 2 * 8 * 128 * 2  # bytes of a token in a layer of Llama 3.1 8B


@pytest.fixture
def switching(request, monkeypatch):
    """Caches as users have them; in other tests they choose at every length."""
    monkeypatch.setattr(GrowingLayer, "switch_over", request.config.switch_over)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_length_follows_what_dense_attention_reads(threads):
    threads(2)
    assert sparse_from(LLAMA, 1, 32, CPU) == 350 + 561
    assert sparse_from(LLAMA // 4, 1, 32, CPU) == pytest.approx(350 + 4 * 561, abs=4)
    assert sparse_from(LLAMA, 8, 32, CPU) == 350 + 70  # sequences share the work that a step takes once
    assert sparse_from(LLAMA, 1, 1, CPU) == 350 + 280  # one query head keeps one thread busy
    assert sparse_from(LLAMA, 1, 32, CPU, ON_X86) == 750 + 244  # dense steps are faster, by BPC's kernel
    threads(1)
    assert sparse_from(LLAMA, 1, 32, CPU) == 350 + 280


def test_in_vllm_it_follows_the_vector_instructions(threads, monkeypatch):
    threads(1)
    for capability, amx, one, eight in (
        ("AVX512", True, 2905, 2638),
        ("AVX512", False, 856, 632),
        ("AVX2", False, 856, 632),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)  # noqa: B023
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)  # noqa: B023
        assert sparse_from(LLAMA, 1, 32, CPU, in_vllm()) == one
        assert sparse_from(LLAMA, 8, 32, CPU, in_vllm()) == eight
    assert sparse_from(LLAMA, 1, 32, CPU, IN_TRANSFORMERS) == 630


def test_on_a_gpu_it_follows_the_bandwidth(monkeypatch):
    about = SimpleNamespace(memory_clock_rate=3_201_000, memory_bus_width=6144)  # of an H200, whose memory has 4.8 TB/s
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    assert 32_000 < sparse_from(LLAMA, 1, 32, torch.device("cuda", 0)) < 33_000
    assert 4_000 < sparse_from(LLAMA, 8, 32, torch.device("cuda", 0)) < 4_125
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert 6_500 < sparse_from(LLAMA, 1, 32, torch.device("cuda", 0)) < 6_700


@torch.inference_mode()
def test_a_cache_attends_to_all_until_choosing_pays(switching, monkeypatch):
    monkeypatch.setattr("bpc_calib.runtime.layers.sparse_from", lambda *shape: 45)
    model, ids = tiny.model(), torch.arange(40).unsqueeze(0)
    enable(model)
    rules = {"budget": 8, "min_tokens": 8, "dense_layers": ()}
    caches = [
        BPCCache(model.config, tiny.artifact(model.config), **rules, min_context=start) for start in (None, 45, 10**9)
    ]
    assert [cache.min_context for cache in caches] == [0, 45, 10**9]
    for step in range(8):
        logits = [model(ids, **with_cache(cache)).logits[:, -1] for cache in caches]
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2]) == (step < 5)
        codes = {"codes" in layer.buffers for layer in caches[0].layers}
        assert codes == {step >= 5}  # the prompt is hashed when the first step chooses
        ids = logits[0].argmax(-1, keepdim=True)
    assert caches[0].min_context == 45
    assert caches[0].kv_bytes(44)[0] == caches[0].kv_bytes(44)[1]
    assert caches[0].kv_bytes(45)[0] < caches[0].kv_bytes(45)[1]


def test_it_follows_what_attends_to_all_on_the_processor():
    assert costs_of(own_from(CPU, torch.float32)) is IN_TRANSFORMERS
    slow = backend(CPU) == "native" and (is_x86() or slow_products(torch.bfloat16) is not None)
    assert costs_of(own_from(CPU, torch.bfloat16)) is (ON_X86 if slow else IN_TRANSFORMERS)


def test_the_processor_decides_what_attends_to_all(threads, monkeypatch):
    """With AMX torch attends to a short context faster than BPC's kernel, and so it does on Arm to any."""
    threads(2)
    monkeypatch.setattr("bpc_calib.runtime.layers.slow_products", lambda dtype: None)
    native = backend(CPU) == "native"
    for amx in (True, False):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda amx=amx: amx, raising=False)
        for capability in ("AVX512", "AVX2", "DEFAULT"):  # the last is an Arm processor's
            monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda told=capability: told)
            own = native and capability != "DEFAULT"
            assert costs_of(own_from(CPU, torch.bfloat16)) is (ON_X86 if own else IN_TRANSFORMERS)
            assert costs_of(own_from(CPU, torch.float32)) is IN_TRANSFORMERS
            short = own and not (amx and capability == "AVX512")
            assert [size >= own_from(CPU, torch.bfloat16) for size in (2.3e6, 2.5e6)] == [short, own]


@torch.inference_mode()
@pytest.mark.parametrize("dense", [(), (0,)])
@pytest.mark.parametrize("padded", [False, True])
def test_dense_steps_of_a_processor_without_16_bit_products(monkeypatch, dense, padded):
    """BPC's kernel attends to all tokens in every layer; the prompt's pass stays the model's own."""
    if backend(CPU) != "native":
        pytest.skip("the kernels for CPUs are not built")
    calls, run = [], kernels.dense_decode
    monkeypatch.setattr("bpc_calib.runtime.layers.slow_products", lambda dtype: 6.0)
    monkeypatch.setattr(kernels, "dense_decode", lambda *given, **named: calls.append(1) or run(*given, **named))
    model, mask = tiny.model(), torch.ones(2, 30, dtype=torch.int64)
    ids = torch.randint(5, 100, (2, 30), generator=torch.Generator().manual_seed(0))
    mask[0, :7] = 0 if padded else 1
    enable(model)
    cache = BPCCache(model.config, tiny.artifact(model.config), dense_layers=dense, min_context=10**9)
    full, layers = DynamicCache(config=model.config), model.config.num_hidden_layers
    for step in range(4):
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        found, expected = (
            model(ids, attention_mask=mask, position_ids=places, **with_cache(each)).logits[:, -1]
            for each in (cache, full)
        )
        assert len(calls) == step * layers
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        ids, mask = expected.argmax(-1, keepdim=True), torch.nn.functional.pad(mask, (0, 1), value=1)


@torch.inference_mode()
def test_a_batch_reaches_it_earlier(switching):
    model = tiny.model()
    enable(model)
    starts = []
    for rows in (1, 4):
        cache = BPCCache(model.config, tiny.artifact(model.config))
        model(torch.ones(rows, 5, dtype=torch.int64), **with_cache(cache))
        starts.append(cache.min_context)
    assert 0 < starts[1] < starts[0] / 2


@torch.inference_mode()
def test_what_compares_methods_chooses_at_every_length(switching):
    model, ids = tiny.model(), torch.ones(1, 5, dtype=torch.int64)
    enable(model)
    compared = make_cache("bpc", model.config, tiny.artifact(model.config), 8)
    for cache in (compared, probe(model.config, {})):
        model(ids, **with_cache(cache))
        assert cache.min_context == 0
    assert prefill(model, ids).min_context == 0
