"""The same functions on a GPU: exact where they must be, near where a matrix product rounds its own way."""

import contextlib
import functools

import numpy as np
import pytest
import tiny
import torch
from test_decomposition import random_keys

from bpc_calib import (
    BPCCache,
    decompose,
    enable,
    encode,
    hash_scores,
    quantize_query,
    select,
    static_generate,
    static_steps,
)
from bpc_calib.compat import with_cache
from bpc_calib.method.encoding import encode_gram
from bpc_calib.method.selection import worst_first
from bpc_calib.runtime.static_steps import warm_up

SMALL = {"budget": 5, "min_tokens": 1, "dense_layers": ()}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_decompose_gives_the_same_projection_as_on_the_cpu():
    keys = random_keys(2, 10_000, 64)
    here, there = decompose(keys), decompose(keys.cuda())
    # A sum in another order in float64: no sign is that near to 0.
    assert torch.equal(here.codes, there.codes.cpu())
    torch.testing.assert_close(here.projection, there.projection.cpu(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(here.residual_norms, there.residual_norms.cpu(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_encode_differs_only_where_a_product_rounds(dtype):
    projection = decompose(random_keys(4000, 64, seed=1)).projection
    keys = random_keys(50_000, 64).to(dtype)
    here, there = encode(keys, projection), encode(keys.cuda(), projection.cuda())
    assert (here.codes != there.codes.cpu()).any(-1).sum() <= 5
    assert ((here.gain.int() - there.gain.cpu().int()).abs() > 1).sum() <= 5
    scores, gram = torch.randn(1000, 64), torch.randn(64, 64)
    same, other = (
        encode_gram(scores, gram, torch.ones(1000)),
        encode_gram(scores.cuda(), gram.cuda(), torch.ones(1000).cuda()),
    )
    assert torch.equal(same.codes, other.codes.cpu())  # from the same products: bit for bit


def test_scores_and_selection_are_exact():
    projection = decompose(random_keys(4000, 64, seed=1)).projection
    encoded = encode(random_keys(3000, 64), projection)
    query = quantize_query(random_keys(4, 64, seed=2), projection)
    on_gpu = type(query)(query.tables.cuda(), query.scale.cuda())
    scores = hash_scores(query, encoded.codes, encoded.gain)
    assert torch.equal(scores, hash_scores(on_gpu, encoded.codes.cuda(), encoded.gain.cuda()).cpu())
    rules = {"recent": 1, "sink": 2, "safeguard": 0.1}
    here = select(scores.amax(-2), 60, worst=worst_first(encoded.error), **rules)
    there = select(scores.amax(-2).cuda(), 60, worst=worst_first(encoded.error.cuda()), **rules)
    assert torch.equal(here, there.cpu())


def test_calibrates_on_the_gpu(text_folder):
    settings = {"corpora": [str(text_folder)], "samples": 4, "bits": 32}
    here = tiny.calibrated(tiny.model(), tiny.tokenizer(), **settings)
    there = tiny.calibrated(tiny.model().cuda(), tiny.tokenizer(), **settings)
    assert here.metadata["calibration"] == there.metadata["calibration"]
    for layer, held in here.layers.items():
        np.testing.assert_allclose(held.residual[:, -1], there.layers[layer].residual[:, -1], atol=0.02)


@pytest.mark.parametrize("rules", [SMALL, SMALL | {"bits": 128, "gain": False}, SMALL | {"group": "max", "sink": 3}])
def test_decoding_is_the_same_as_on_the_cpu(rules):
    """In float64, so that no selection hangs on how a product is rounded."""
    ids = torch.randint(250, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(60) >= torch.tensor([[0], [17]])).long()
    made = []
    for device in ("cpu", "cuda"):
        model = tiny.model().double().to(device)
        enable(model)
        arguments = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2, "pad_token_id": 256}
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        made.append(model.generate(**inputs, **with_cache(BPCCache(model.config, **rules)), **arguments).cpu())
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "rules", [SMALL, SMALL | {"dense_layers": (1,), "safeguard": 0.2, "recent": 1}, {"budget": 1.0}]
)
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_captured_steps_give_what_growing_ones_do(rules, calibrated, padded):
    """In float64; then the cache goes on, in buffers that grow."""
    ids = torch.randint(250, (2, 60), generator=torch.Generator().manual_seed(0)).cuda()
    mask = (torch.arange(60) >= torch.tensor([[0], [17 * padded]])).long().cuda()
    model = tiny.model().double().cuda()
    enable(model)
    made = []
    for static in (False, True):
        artifact = tiny.artifact(model.config, metric=True, centred=True) if calibrated else None
        cache = BPCCache(model.config, artifact, **rules)
        settings = {"do_sample": False, "pad_token_id": 256, "output_logits": True, "return_dict_in_generate": True}
        if static:
            generate = functools.partial(static_generate, model, cache=cache, **settings)
        else:
            generate = functools.partial(model.generate, **with_cache(cache), **settings)
        first = generate(ids, attention_mask=mask, max_new_tokens=12)
        longer = torch.nn.functional.pad(mask, (0, 12), value=1)
        second = generate(first.sequences, attention_mask=longer, max_new_tokens=8)
        made.append([*first.logits, *second.logits])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@contextlib.contextmanager
def without_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_steps_do_not_wait_for_the_device(monkeypatch):
    """Nor does the step that is captured, in its warm-up."""
    model = tiny.model().cuda()
    enable(model)
    cache = BPCCache(model.config, **SMALL)
    ids = torch.randint(250, (1, 60), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        model(ids, **with_cache(cache))
    token, warmed = ids[:, :1].clone(), []

    def warm_up_without_waiting(run, state):
        warmed.append(run)
        with without_waiting():
            warm_up(run, state)

    monkeypatch.setattr("bpc_calib.runtime.static_steps.warm_up", warm_up_without_waiting)
    with static_steps(model, cache, 8) as step:
        for _ in range(3):
            token = step(token).argmax(-1, keepdim=True)
        with without_waiting():
            for _ in range(4):
                token = step(token).argmax(-1, keepdim=True)
    assert len(warmed) == 1
    assert cache.get_seq_length() == 67
    assert 0 <= int(token) < tiny.VOCAB


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_keys_and_values_in_main_memory_give_the_same_tokens(family):
    """What test_apart.py does with a device that is not there."""
    model = tiny.model(family).cuda()
    enable(model)
    ids, mask = tiny.prompt(60, 33)
    texts = []
    for kv_device in (None, "cpu"):
        cache = BPCCache(model.config, **SMALL, min_context=0, kv_device=kv_device)
        made = model.generate(
            ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=12, do_sample=False, **with_cache(cache)
        )
        texts.append(made.tolist())
    assert texts[0] == texts[1]
    held = {name: buffer.device.type for name, buffer in cache.layers[-1].buffers.items()}
    assert (held["keys"], held["values"], held["codes"]) == ("cpu", "cpu", "cuda")
