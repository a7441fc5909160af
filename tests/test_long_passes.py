"""Long passes of 16-bit models in float32: nearer to the float32 model, in the same dtype, and steps as they were."""

import copy

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bpc_calib.models.loading import load_model
from bpc_calib.models.long_passes import LONG, slow_products, widen_long_passes

HALVES = [torch.bfloat16, torch.float16]


class Products(TorchDispatchMode):
    """The dtypes of the products that run inside the block."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if any(word in name for word in ("mm", "linear", "attention")):
            self.seen |= {each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()}
        return function(*args, **(kwargs or {}))


def ids(tokens):
    return torch.randint(250, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def ran(model, tokens):
    with Products() as products, torch.no_grad():
        logits = model(ids(tokens)).logits
    return logits, products.seen


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_a_long_pass_multiplies_in_float32(family, dtype):
    exact = tiny.model(family)
    narrow = copy.deepcopy(exact).to(dtype)
    wide = copy.deepcopy(narrow)
    widen_long_passes(wide)
    found, seen = ran(wide, 64)
    assert seen == {torch.float32}
    assert found.dtype == dtype
    plain, seen = ran(narrow, 64)
    assert dtype in seen
    expected, _ = ran(exact.to(dtype).float(), 64)  # the same rounded weights
    assert (found.float() - expected).norm() < 1.1 * (plain.float() - expected).norm()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_short_pass_and_the_weights_stay_as_they_are(dtype):
    narrow = tiny.model().to(dtype)
    wide = copy.deepcopy(narrow)
    widen_long_passes(wide)
    assert torch.equal(ran(wide, LONG - 1)[0], ran(narrow, LONG - 1)[0])
    assert all(map(torch.equal, wide.parameters(), narrow.parameters()))


def test_a_failed_pass_leaves_nothing_behind():
    model = tiny.model().bfloat16()
    widen_long_passes(model)
    with pytest.raises(IndexError):
        model(torch.full((1, LONG), 10**6))
    left = torch.ones(2, 2, dtype=torch.bfloat16)
    with Products() as products:
        left @ left
    assert products.seen == {torch.bfloat16}


def test_float32_is_never_slow():
    assert slow_products(torch.float32) is None


@pytest.mark.parametrize("ratio", [None, 3.0])
def test_models_are_loaded_for_this_processor(tmp_path, monkeypatch, ratio):
    """As if the processor were one with such products, and one without."""
    monkeypatch.setattr("bpc_calib.models.long_passes.slow_products", lambda dtype: ratio)
    model = load_model(str(tiny.save(tmp_path / "tiny")), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    _, seen = ran(model, 64)
    assert (seen == {torch.float32}) == (ratio is not None)
