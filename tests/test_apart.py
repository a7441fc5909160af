"""Keys and values in main memory beside a model on another device: the same tokens, and few bytes between the two."""

import functools
import itertools
import os
from collections import Counter
from unittest import mock

import pytest
import tiny
import torch
from virtual_device import DEVICE, There, move, virtual_device

from bpc_calib import BPCCache, InputError, checked_decoding, enable, exact_decoding, static_generate
from bpc_calib.compat import with_cache
from bpc_calib.runtime.hashed_layer import BPCLayer

FEW = {"budget": 0.2, "min_tokens": 8, "min_context": 0}
NEW = 6
LENGTHS = {"one": (60,), "padded": (60, 33, 41)}


@functools.cache
def models(family="llama"):
    """Return the same model on the CPU and on the virtual device, both enabled."""
    pair = tiny.model(family), tiny.model(family)
    for model in pair:
        enable(model)
    move(pair[1])
    return pair


def generate(model, ids, mask, cache, new=NEW, **more):
    made = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new, min_new_tokens=new,
        do_sample=False, **with_cache(cache), **more,
    )  # fmt: skip
    return made.cpu()


def same(family, lengths=(60,), artifact=None, rules=FEW, **more):
    """Assert that both devices make the same tokens, and cache the same; return the cache of the virtual one."""
    here, there = models(family)
    ids, mask = tiny.prompt(*lengths)
    near = BPCCache(here.config, artifact, **rules)
    with mock.patch.dict(os.environ, {"BPC_BACKEND": "torch"}):  # which fits online projections there, too
        expected = generate(here, ids, mask, near, **more)
    with virtual_device():
        apart = BPCCache(there.config, artifact, kv_device="cpu", **rules)
        assert torch.equal(generate(there, ids, mask, apart, **more), expected)
        for one, other in zip(apart.layers, near.layers, strict=True):
            torch.testing.assert_close(one.keys.cpu(), other.keys, rtol=1e-4, atol=1e-4)
    for layer in apart.layers:
        if isinstance(layer, BPCLayer):
            assert not isinstance(layer.buffers["keys"], There)
            assert not isinstance(layer.buffers["values"], There)
            assert isinstance(layer.buffers["codes"], There)
            assert layer.hashed
    return apart


def cases():
    """Every family, length and kind of projections; a push runs each once."""
    often = {("llama", "padded", "online"), ("gemma3_text", "one", "calibrated"), ("qwen3", "padded", "needs")}
    for case in itertools.product(("llama", "gemma3_text", "qwen3"), LENGTHS, ("online", "calibrated", "needs")):
        yield pytest.param(*case, marks=() if case in often else pytest.mark.slow)
    for family in sorted(tiny.FAMILIES.keys() - {"llama", "gemma3_text", "qwen3"}):
        yield pytest.param(family, "padded", "needs", marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "lengths", "made"), list(cases()))
def test_the_tokens_are_those_of_one_device(family, lengths, made):
    """Dense layers, layers that choose, sliding windows; with padding."""
    artifact = None
    if made != "online":
        artifact = tiny.artifact(models(family)[0].config, metric=True, centred=True, needs=made == "needs")
    same(family, LENGTHS[lengths], artifact, FEW | {"safeguard": 0.3, "recent": 1, "sink": 2})


def test_steps_that_attend_to_all_are_computed_by_the_cpu():
    apart = same("llama", rules=FEW | {"min_context": 63})
    assert [layer.hashed for layer in apart.layers[2:]] == [65]


@pytest.mark.parametrize("chunk", [7, pytest.param(25, marks=pytest.mark.slow)])
def test_prompts_in_chunks(chunk):
    """Short passes are attended to by the CPU, for long ones the keys come up."""
    same("llama", prefill_chunk_size=chunk)


@pytest.mark.parametrize("family", ["gemma3_text", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [exact_decoding, checked_decoding])
def test_verified_tokens(family, way):
    more = {"draft": 3} if way is exact_decoding else {"every": 2}
    assert same(family, custom_generate=way, new=12, **more).agreement.checked


def test_beams():
    same("llama", num_beams=3)


def test_crop_and_other_text(monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", "torch")  # which fits online projections on both devices
    here, there = models()
    ids, mask = tiny.prompt(60)
    more = torch.arange(20).unsqueeze(0) + 30
    results = []
    for model, kv_device in ((here, None), (there, "cpu")):
        with virtual_device():
            cache = BPCCache(model.config, **FEW, kv_device=kv_device)
            text = generate(model, ids, mask, cache)
            cache.crop(-9)
            for count in (20, 4, 1):  # a pass whose keys come up, one that the CPU computes, a step
                text = torch.cat([text[:, : cache.get_seq_length()], more[:, :count]], 1)
                text = generate(model, text, torch.ones_like(text), cache)
            cache.prepare()
            results.append((text, cache.get_seq_length(), [layer.hashed for layer in cache.layers[2:]]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("length", [60, 100])
def test_the_bytes_of_a_step_are_those_of_queries_indices_and_outputs(length):
    """With a fixed number of tokens nothing grows with the context."""
    _, there = models()
    ids, mask = tiny.prompt(length)
    with virtual_device() as moved:
        cache = BPCCache(there.config, budget=8, min_tokens=1, min_context=0, kv_device="cpu")
        generate(there, ids, mask, cache)
        text, mask = ids.to(DEVICE), mask.to(DEVICE)
        before = Counter(moved)
        step = there(
            text[:, -1:], attention_mask=torch.nn.functional.pad(mask, (0, NEW), value=1),
            position_ids=torch.tensor([[cache.get_seq_length()]], device=DEVICE), **with_cache(cache),
        )  # fmt: skip
        moved.subtract(before)
        assert isinstance(step.logits, There)
    model = there.config
    heads, kv_heads, layers = model.num_attention_heads, model.num_key_value_heads, model.num_hidden_layers
    dim, number, choosing = model.hidden_size // heads, 4, layers - 2
    assert moved["down"] == layers * (2 * kv_heads + heads) * dim * number + choosing * kv_heads * 8 * 8
    assert moved["numbers"] < 16  # what transformers and BPC ask of masks: whether all is true
    assert moved["up"] == layers * heads * dim * number + choosing * kv_heads * dim * number


def test_what_static_steps_need_is_refused():
    _, there = models()
    ids, mask = tiny.prompt(60)
    with virtual_device():
        cache = BPCCache(there.config, **FEW, kv_device="cpu")
        generate(there, ids, mask, cache)
        with pytest.raises(InputError, match="leave kv_device out"):
            static_generate(there, ids.to(DEVICE), cache=cache, max_new_tokens=4)


def test_a_model_on_the_cpu_needs_no_other_place():
    """The device is the same, so nothing is apart: the same bits as without."""
    here, _ = models()
    ids, mask = tiny.prompt(60)
    caches = [BPCCache(here.config, **FEW, kv_device=kv_device) for kv_device in (None, "cpu")]
    texts = [generate(here, ids, mask, cache) for cache in caches]
    assert torch.equal(*texts)
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert not other.apart
        assert torch.equal(one.keys, other.keys)
