"""Fitting with compiled kernels: the same projections as plain torch, bit for bit, for any number of threads."""

import pytest
import torch

from bpc_calib import InputError
from bpc_calib.backends.cpu import backend
from bpc_calib.backends.cpu.fitting import WORD
from bpc_calib.backends.dispatch import find
from bpc_calib.method import fitting

OPTIONS = {
    "paper": {"iterations": 1},
    "score-aware": {"rounds": 3, "metric": True, "centred": True},
    "padding": {"rounds": 2, "centred": True, "weights": True},
    "converged": {"iterations": 40},
}


def made_keys(count, dim, dtype, seed=0):
    """Keys `[2, 3, count, dim]` with directions of unequal strength and a mean."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 3, count, dim, generator=generator) * torch.linspace(2, 0.1, dim)
    return (keys + torch.randn(3, 1, dim, generator=generator)).to(dtype)


def arguments(keys, metric=False, weights=False, centred=False, **options):
    generator = torch.Generator().manual_seed(1)
    if metric:
        root = torch.randn(*keys.shape[:2], keys.shape[-1], keys.shape[-1], generator=generator)
        options["metric"] = root @ root.mT / keys.shape[-1] + torch.eye(keys.shape[-1])
    if weights:
        options["weights"] = torch.rand(keys.shape[:-1], generator=generator) > 0.3
    if centred:
        options["mean"] = fitting.mean_key(keys, options.get("weights"))
    return options


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("count", "dim", "dtype", "bits"),
    [
        (8 * WORD - 1, 8, torch.float32, 32),
        (16 * WORD, 64, torch.bfloat16, 64),
        # Plain torch needs half a minute.
        pytest.param(5000, 80, torch.float16, 128, marks=[pytest.mark.slow, pytest.mark.rare]),
        (4097, 16, torch.bfloat16, 32),
    ],
)
def test_the_kernels_find_the_same_projection(count, dim, dtype, bits, option):
    keys = made_keys(count, dim, dtype)
    options = arguments(keys, **OPTIONS[option])
    found, expected = backend.fit(keys, bits, **options), fitting.fit(keys, bits, **options)
    assert torch.equal(found.projection, expected.projection)
    # The norms are roots of differences, so what is left at the end has fewer correct digits.
    torch.testing.assert_close(found.residual_norms, expected.residual_norms, rtol=1e-9, atol=1e-6)


def test_threads_change_no_bit():
    keys = made_keys(3000, 32, torch.bfloat16)
    options = arguments(keys, **OPTIONS["score-aware"])
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(backend.fit(keys, 64, **options))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for each in found[1:]:
        assert torch.equal(each.projection, found[0].projection)
        assert torch.equal(each.residual_norms, found[0].residual_norms)


def test_layouts_change_no_bit():
    keys = made_keys(500, 24, torch.float32)
    spread = torch.zeros(3, 500, 2, 48).permute(2, 0, 1, 3)[..., ::2]
    spread.copy_(keys)
    assert not spread.is_contiguous()
    assert torch.equal(backend.fit(spread, 32, rounds=1).projection, backend.fit(keys, 32, rounds=1).projection)
    assert torch.equal(backend.fit(keys[1, 2], 32).projection, backend.fit(keys, 32).projection[1, 2])


def test_a_head_without_keys_has_no_projection():
    keys = made_keys(100, 16, torch.float32)
    weights = torch.ones(2, 3, 100)
    weights[1, 1] = 0
    found, expected = (fit(keys, 32, rounds=1, weights=weights) for fit in (backend.fit, fitting.fit))
    assert torch.equal(found.projection, expected.projection)
    assert found.projection[1, 1].eq(0).all()


def test_wrong_arguments_are_refused():
    keys = made_keys(100, 16, torch.float32)
    broken = keys.clone()
    broken[1, 2, 3, 4] = torch.nan
    for bad, options in [
        (broken, {}),
        (keys, {"bits": 48}),
        (keys, {"iterations": 0}),
        (keys, {"weights": torch.ones(5)}),
        (keys, {"metric": -torch.eye(16)}),
        (keys, {"mean": torch.zeros(16)}),
    ]:
        with pytest.raises(InputError) as ours:
            backend.fit(bad, **options)
        with pytest.raises(InputError) as plain:
            fitting.fit(bad, **options)
        assert str(ours.value) == str(plain.value)


def test_float64_keys_go_to_plain_torch():
    keys = made_keys(300, 16, torch.float64)
    assert torch.equal(find(keys[None]).fit(keys, 32).projection, fitting.fit(keys, 32).projection)
