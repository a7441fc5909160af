"""Linear layers of a few tokens: the kernel beside float64, where it serves, and a model that uses it."""

import pytest
import tiny
import torch
from torch.nn.functional import linear as plain_linear

from bpc_calib import InputError, compat, compile_layers, enable
from bpc_calib.backends import linear as module
from bpc_calib.backends.cpu import native
from bpc_calib.backends.linear import MOST, linear, slow_in_torch
from bpc_calib.runtime import few_tokens
from bpc_calib.runtime.few_tokens import serve_few_tokens

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def torch_is_slow(monkeypatch):
    monkeypatch.setattr(module, "faster_than_torch", lambda: True)


def check(dtype, counts, outputs, columns):
    """The product of every number of tokens is exact but for the rounding of sums in float32."""
    weight = draw(outputs, columns).to(dtype)
    for count in counts:
        tokens = draw(count, columns, seed=count).to(dtype)
        found, exact = linear(tokens, weight), plain_linear(tokens.double(), weight.double())
        assert found.dtype == torch.float32
        assert (found - exact).norm() <= 1e-6 * exact.norm(), (dtype, count, outputs, columns)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_exact_but_for_the_rounding_of_sums(dtype):
    check(dtype, range(1, MOST + 1), 7, 96)
    check(dtype, (1, 2, 9), 1, 32)
    check(dtype, (1, 3, 8, 17), 1003, 1504)  # several parts, and rows left over


def test_tokens_may_lie_anywhere():
    weight, tokens = draw(40, 64), draw(64, 5, seed=1)
    torch.testing.assert_close(linear(tokens.T, weight), plain_linear(tokens.T, weight))


def test_torchs_products_stay_the_same():
    """The kernel leaves no shape of AMX's tiles behind that torch takes for its own."""
    weight, tokens = draw(96, 256).bfloat16(), draw(40, 256, seed=1).bfloat16()
    before = plain_linear(tokens, weight)
    linear(tokens[:20], weight)
    assert torch.equal(plain_linear(tokens, weight), before)


def test_tokens_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="do not fit weights"):
        linear(draw(2, 64), draw(4, 32))
    with pytest.raises(InputError, match="do not fit weights"):
        linear(draw(2, 32).bfloat16(), draw(4, 32))


def test_where_torch_is_slow(monkeypatch):
    isa = native.isa()
    for x86, amx, kernels, slow in (
        (True, False, isa, True), (True, True, "amx", True), (True, True, "avx512", False), (False, False, isa, False),
    ):  # fmt: skip
        monkeypatch.setattr(compat, "is_x86", lambda: x86)  # noqa: B023
        monkeypatch.setattr(compat, "has_amx", lambda: amx)  # noqa: B023
        monkeypatch.setattr(native, "isa", lambda: kernels)  # noqa: B023
        assert [slow_in_torch(draw(8, 64).to(dtype)) for dtype in DTYPES] == [slow] * 3
    monkeypatch.setattr(compat, "is_x86", lambda: True)
    for other in (draw(8, 65), draw(64, 8).T, draw(8, 64).double(), draw(8, 64).to("meta")):
        assert not slow_in_torch(other)
    monkeypatch.setenv("BPC_BACKEND", "torch")
    assert not slow_in_torch(draw(8, 64))


def test_weights_that_are_loaded_when_they_are_used_stay_torchs(monkeypatch):
    torch_is_slow(monkeypatch)
    model = tiny.model()
    model.lm_head._hf_hook = object()  # as accelerate marks them
    serve_few_tokens(model)
    assert not any("forward" in vars(each) for each in model.modules())


def test_a_served_model_is_compiled_like_any_other(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch_is_slow(monkeypatch)
    plain, served = tiny.model(), tiny.model()
    enable(served)
    serve_few_tokens(served)
    compile_layers(served)
    ids = torch.tensor([[5]])
    with torch.inference_mode():
        torch.testing.assert_close(served(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert all("forward" in vars(each) for each in served.get_decoder().layers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # with biases
def test_a_model_computes_the_same_but_for_rounding(family, dtype, monkeypatch):
    torch_is_slow(monkeypatch)
    plain, served = (tiny.model(family).to(dtype) for _ in range(2))
    exact = tiny.model(family).to(dtype).double()
    serve_few_tokens(served)
    counts = []
    monkeypatch.setattr(
        few_tokens, "linear", lambda tokens, weight: counts.append(len(tokens)) or linear(tokens, weight)
    )
    for batch, tokens in ((1, 1), (8, 1), (1, 5), (2, MOST)):
        ids = torch.arange(batch * tokens).view(batch, tokens) * 7 % tiny.VOCAB
        with torch.inference_mode():
            expected, found, right = (each(ids).logits.double() for each in (plain, served, exact))
        assert (found - right).norm() <= 1.1 * (expected - right).norm() + 1e-6 * right.norm()
    assert torch.equal(found, expected)  # many tokens
    assert set(counts) == {1, 8, 5}
    found = served(torch.tensor([[5]])).logits
    assert torch.equal(found, plain(torch.tensor([[5]])).logits)  # a pass that could be differentiated
    found.sum().backward()
    assert served.get_decoder().layers[0].mlp.up_proj.weight.grad is not None
