"""Algorithm 1: equality with a literal implementation, its identities, and its guaranteed properties."""

from itertools import pairwise

import literal
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpc_calib import Decomposition, InputError, decompose
from bpc_calib.method.codes import unpack_codes
from bpc_calib.method.decomposition import BLOCK

sizes = st.integers(1, 70)


def random_keys(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(shape, generator=generator) * torch.logspace(0, -1.5, shape[-1])
    return (keys + 0.3 * torch.randn(shape[-1], generator=generator)).to(dtype)


def assert_same(one: Decomposition, other: Decomposition) -> None:
    """Assert equality up to the rounding of sums. Ignore the codes of bits whose residual is only rounding error.

    Squares are compared: `norms_by_bit` subtracts from `|K|^2`, whose last digits are all that is left of a residual of 0.
    """
    ours, others = one.residual_norms.square(), other.residual_norms.square()
    rounding = 1e-14 * float(ours[0])
    left = ours[:-1] > rounding
    bits = len(left)
    differs = unpack_codes(one.codes, bits) != unpack_codes(other.codes, bits)
    assert not differs[:, left].any()
    torch.testing.assert_close(one.projection, other.projection, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours, others, rtol=1e-9, atol=rounding)


def draws(bits: int, dim: int) -> torch.Tensor:
    return torch.randn(bits, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("iterations", [1, 8])
@pytest.mark.parametrize("bits", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decompose_equals_the_literal_algorithm(iterations, bits, dtype):
    keys = random_keys(3000, 64, dtype=dtype)
    found = decompose(keys, bits, iterations=iterations)
    codes, projection, residual = literal.decompose(keys, draws(bits, 64), iterations)
    assert torch.equal(unpack_codes(found.codes, bits).double(), codes)
    torch.testing.assert_close(found.projection, projection.float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(found.residual_norms[-1], residual.norm(), rtol=1e-12, atol=0)


def test_a_metric_equals_the_literal_algorithm_on_transformed_keys():
    keys, turn = random_keys(2000, 16), random_keys(16, 16, seed=1).double()
    metric = (turn @ turn.T).float()
    found = decompose(keys, 32, iterations=3, metric=metric)
    root = torch.linalg.cholesky(metric.double())
    codes, projection, residual = literal.decompose(keys.double() @ root, draws(32, 16), 3)
    assert torch.equal(unpack_codes(found.codes, 32).double(), codes)
    torch.testing.assert_close(found.projection.double() @ root, projection, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.residual_norms[-1], residual.norm(), rtol=1e-12, atol=0)
    # The residual norm is the norm of the keys' residual in the metric.
    left = keys.double() - codes @ found.projection.double()
    torch.testing.assert_close((left @ metric.double() * left).sum().sqrt(), residual.norm(), rtol=1e-6, atol=0)


def test_the_identity_metric_changes_nothing():
    keys = random_keys(3, 700, 16)
    plain, other = decompose(keys, 32), decompose(keys, 32, metric=torch.eye(16).expand(3, 16, 16))
    assert torch.equal(plain.codes, other.codes)
    assert torch.equal(plain.projection, other.projection)
    assert torch.equal(plain.residual_norms, other.residual_norms)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (torch.eye(5), "do not fit"),
        (torch.eye(4).expand(2, 4, 4), "do not fit"),
        (-torch.eye(4), "metric must be positive definite"),
        (torch.eye(4) * torch.nan, "metric must be positive definite"),
    ],
)
def test_refuses_a_bad_metric(metric, message):
    with pytest.raises(InputError, match=message):
        decompose(torch.ones(3, 10, 4), 32, metric=metric)


def test_many_blocks_equal_the_literal_algorithm():
    keys = random_keys(2 * BLOCK + 77, 16)
    found = decompose(keys, 32, iterations=2)
    codes, projection, residual = literal.decompose(keys, draws(32, 16), 2)
    assert torch.equal(unpack_codes(found.codes, 32).double(), codes)
    torch.testing.assert_close(found.projection, projection.float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(found.residual_norms[-1], residual.norm(), rtol=1e-12, atol=0)


def test_residual_norms_are_the_norms_of_the_residual():
    keys = random_keys(500, 32).double()
    found = decompose(keys, 32)
    codes = unpack_codes(found.codes, 32).double()
    for bit in range(33):
        rest = keys - codes[:, :bit] @ found.projection[:bit].double()
        torch.testing.assert_close(found.residual_norms[bit], rest.norm(), rtol=1e-6, atol=0)
    assert (found.residual_norms.diff() <= 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_more_iterations_never_raise_the_residual_of_a_bit(seed):
    # Only the first bit starts from the same residual and draw.
    keys = random_keys(400, 24, seed=seed)
    first_bit = [float(decompose(keys, 32, iterations=n).residual_norms[1]) for n in range(1, 9)]
    assert all(after <= before * (1 + 1e-14) for before, after in pairwise(first_bit))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), heads=st.integers(1, 3), count=sizes, dim=sizes)
def test_a_batch_equals_its_members(seed, heads, count, dim):
    keys = random_keys(2, heads, count, dim, seed=seed)
    batch = decompose(keys, 32, iterations=3)
    assert batch.projection.shape == (2, heads, 32, dim)
    assert batch.codes.shape == (2, heads, count, 1)
    assert batch.residual_norms.shape == (2, heads, 33)
    for i in range(2):
        for head in range(heads):
            member = Decomposition(batch.projection[i, head], batch.codes[i, head], batch.residual_norms[i, head])
            assert_same(decompose(keys[i, head], 32, iterations=3), member)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=sizes, padding=sizes, dim=sizes, left=st.booleans())
def test_padding_of_weight_zero_is_ignored(seed, count, padding, dim, left):
    keys = random_keys(count, dim, seed=seed)
    garbage = torch.full((padding, dim), torch.nan)
    weights = torch.cat([torch.zeros(padding), torch.ones(count)])
    padded = torch.cat([garbage, keys])
    real = slice(padding, None)
    if not left:
        padded, weights, real = padded.flip(0), weights.flip(0), slice(None, count)
        keys = keys.flip(0)
    plain, weighted = decompose(keys, 32), decompose(padded, 32, weights=weights)
    assert_same(plain, Decomposition(weighted.projection, weighted.codes[real], weighted.residual_norms))


def test_ragged_weights_over_several_blocks():
    keys = random_keys(2, BLOCK + 500, 8)
    weights = torch.ones(2, BLOCK + 500)
    weights[1, :700] = 0
    weighted = decompose(keys, 32, weights=weights)
    torch.testing.assert_close(weighted.projection[1], decompose(keys[1, 700:], 32).projection, rtol=1e-6, atol=1e-9)


def test_only_padding_or_zero_keys_return_zeros():
    assert decompose(torch.ones(5, 8), 32, weights=torch.zeros(5)).projection.eq(0).all()
    zero = decompose(torch.zeros(5, 8), 32)
    assert zero.projection.eq(0).all()
    assert zero.residual_norms.eq(0).all()
    assert unpack_codes(zero.codes, 32).eq(1).all()  # sign(0) = +1


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("iterations", [1, 2])
def test_same_bytes_for_any_number_of_threads(iterations, heads):
    keys = random_keys(heads, 2 * BLOCK + 5, 64)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found.append(decompose(keys, 32, iterations=iterations))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(other.projection, found[0].projection)
        assert torch.equal(other.codes, found[0].codes)
        assert torch.equal(other.residual_norms, found[0].residual_norms)


def test_keys_do_not_change_and_the_generator_decides_the_draws():
    keys = random_keys(50, 8).double()
    before = keys.clone()
    one = decompose(keys, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(keys, before)
    assert torch.equal(one.projection, decompose(keys, 32, generator=torch.Generator().manual_seed(1)).projection)
    assert not torch.equal(one.projection, decompose(keys, 32).projection)
    # A shorter code is the beginning of a longer one.
    assert torch.equal(decompose(keys, 64).projection[:32], decompose(keys, 32).projection)


@pytest.mark.parametrize(
    ("keys", "arguments", "message"),
    [
        (torch.ones(4, 8), {"bits": 48}, "bits must be 32, 64 or 128, not 48"),
        (torch.ones(4, 8), {"iterations": 0}, "iterations must be at least 1"),
        (torch.ones(8), {}, "keys must be floating"),
        (torch.ones(0, 8), {}, "keys must be floating"),
        (torch.ones(4, 8, dtype=torch.int64), {}, "keys must be floating"),
        (torch.full((4, 8), torch.inf), {}, "NaN or infinity"),
        (torch.ones(4, 8), {"weights": torch.ones(3)}, "weights must be 0 or 1"),
        (torch.ones(4, 8), {"weights": torch.full((4,), 0.5)}, "weights must be 0 or 1"),
    ],
)
def test_refuses_bad_arguments(keys, arguments, message):
    with pytest.raises(InputError, match=message):
        decompose(keys, **arguments)
