"""Dense layers of a `BPCCache`: BPC's kernel on a CPU, the model's own attention where nothing is chosen."""

import pytest
import tiny
import torch
from drawn import draw

from bpc_calib import BPCCache, enable
from bpc_calib.compat import with_cache
from bpc_calib.runtime.call import AttentionCall, layer_of
from bpc_calib.runtime.layers import DenseLayer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU dense layers run the model's own attention")


def decode(budget, padding=0):
    """Logits of eight steps behind a prompt of two sequences, layers 0 and 2 dense."""
    model = tiny.model()
    enable(model)
    cache = BPCCache(model.config, tiny.artifact(model.config), budget=budget, min_tokens=1, dense_layers=(0, 2))
    ids = torch.randint(250, (2, 48), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[0, :padding] = 0
    with torch.inference_mode():
        model(ids[:, :40], attention_mask=mask[:, :40], **with_cache(cache))
        steps = [
            model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], **with_cache(cache)).logits for t in range(40, 48)
        ]
    return torch.stack(steps)


@pytest.mark.parametrize("padding", [0, 7])
def test_the_kernel_computes_what_the_models_own_attention_computes(monkeypatch, padding):
    monkeypatch.setattr(DenseLayer, "attention", lambda layer, call: None)
    own = decode(8, padding)
    monkeypatch.undo()
    found = decode(8, padding)
    assert not torch.equal(found, own)  # sums in another order
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


def test_a_step_that_chooses_nothing_is_the_models_own(monkeypatch):
    found = decode(1.0, 7)
    monkeypatch.setenv("BPC_BACKEND", "torch")
    assert torch.equal(found, decode(1.0, 7))


def test_the_budget_of_a_dense_layer_follows_that_of_the_cache():
    """It decides which attention computes a step, with the same tokens: all."""
    model = tiny.model()
    cache = BPCCache(model.config, budget=1.0, min_tokens=1, dense_layers=(0,))
    layer = cache.layers[0]
    layer.update(draw(1, 2, 30, 8, seed=1), draw(1, 2, 30, 8, seed=2))
    keys, values = layer.update(draw(1, 2, 1, 8, seed=3), draw(1, 2, 1, 8, seed=4))
    query = draw(1, 4, 1, 8, seed=5)
    call = AttentionCall(None, query, None, 0.5, None, None)
    assert layer_of(keys).attention(call) is None
    cache.set_budget(4)
    found = layer.attention(call)
    grouped = query.view(1, 2, 2, 8)
    expected = ((grouped @ keys.mT * 0.5).softmax(-1) @ values).view(1, 1, 4, 8)
    torch.testing.assert_close(found, expected)


def test_several_new_tokens_at_once_run_the_models_own_attention():
    cache = BPCCache(tiny.model().config, budget=4, min_tokens=1, dense_layers=(0,))
    keys, _ = cache.layers[0].update(draw(1, 2, 30, 8, seed=1), draw(1, 2, 30, 8, seed=2))
    assert layer_of(keys) is None
