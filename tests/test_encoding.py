"""Algorithm 2 in Gram form: codes, error and gain, compared with the literal loop."""

import literal
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decomposition import random_keys

from bpc_calib import InputError, decompose, encode
from bpc_calib.method.codes import pack_codes, unpack_codes
from bpc_calib.method.metric import query_metric, second_moment


@pytest.fixture(scope="module")
def projection() -> torch.Tensor:
    return decompose(random_keys(4000, 64, seed=1), 64).projection


def test_codes_equal_the_literal_loop_in_float32(projection):
    keys = random_keys(50_000, 64)
    codes, running, _ = literal.encode(keys, projection)
    differs = unpack_codes(encode(keys, projection).codes, 64).double() != codes
    rows = differs.any(-1)
    assert rows.sum() <= len(keys) // 10_000
    # The first different bit of a row has a running value that is 0 up to rounding.
    first = differs[rows].to(torch.uint8).argmax(-1)
    limit = 64 * torch.finfo(torch.float32).eps * keys[rows].double().norm(dim=-1) * projection.norm(dim=-1).max()
    assert (running[rows].gather(-1, first[:, None])[:, 0].abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [32, 64, 128])
def test_codes_equal_the_literal_loop_with_the_projection_rounded_once(dtype, bits):
    projection = decompose(random_keys(4000, 64, seed=1), bits).projection
    keys = random_keys(10_000, 64).to(dtype)
    codes, _, _ = literal.encode(keys, projection.to(dtype))
    differs = (unpack_codes(encode(keys, projection).codes, bits).double() != codes).any(-1)
    assert differs.sum() <= (0 if dtype == torch.float64 else 1)


def test_error_and_gain_match_the_approximation(projection):
    keys = random_keys(5000, 64)
    codes, _, residual = literal.encode(keys, projection)
    encoded = encode(keys, projection)
    torch.testing.assert_close(encoded.error.double(), residual.norm(dim=-1), rtol=1e-3, atol=1e-5)
    approximation = codes @ projection.double()
    expected = torch.tensor([literal.gain(*pair) for pair in zip(keys.double(), approximation, strict=True)])
    off = (encoded.gain.int() - expected).abs()
    assert off.max() <= 1  # a value that is one half up to rounding
    assert (off > 0).sum() <= 5


def random_metric(dim: int, seed: int = 3) -> torch.Tensor:
    queries = random_keys(500, dim, seed=seed) @ random_keys(dim, dim, seed=seed + 1)
    return query_metric(second_moment(queries), 1.0)


# The error comes from the rounding of P M to 8, 11 or 24 bits; for float64 keys it comes from its storage in float32.
ERROR_IN_A_METRIC = {torch.bfloat16: 0.1, torch.float16: 0.1 / 8, torch.float32: 2e-4, torch.float64: 1e-6}
# Gains of 500 that may differ by one.
GAINS_OFF = {torch.bfloat16: 50, torch.float16: 50 // 8, torch.float32: 3, torch.float64: 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("with_mean", [False, True])
def test_codes_in_a_metric_equal_the_literal_loop(dtype, with_mean, projection):
    metric = random_metric(64)
    keys, mean = random_keys(5000, 64).to(dtype), random_keys(64, seed=9) if with_mean else None
    rounded = projection.to(dtype).double()
    in_metric = (rounded @ metric.double()).to(dtype)
    centred = keys.double() - (mean.double() if with_mean else 0)
    codes, _, residual = literal.encode(centred, rounded, in_metric)
    encoded = encode(keys, projection, metric=metric, mean=mean)
    rows = (unpack_codes(encoded.codes, 64).double() != codes).any(-1)
    assert rows.sum() <= (0 if dtype == torch.float64 else 3)
    whole = metric.double()
    error = (residual @ whole * residual).sum(-1).sqrt()
    torch.testing.assert_close(encoded.error.double()[~rows], error[~rows], rtol=ERROR_IN_A_METRIC[dtype], atol=0)
    gains = [literal.gain(k, u @ rounded, k @ whole) for k, u in zip(centred[:500], codes, strict=False)]
    off = (encoded.gain[:500].int() - torch.tensor(gains)).abs()
    assert off.max() <= 1
    assert (off > 0).sum() <= GAINS_OFF[dtype]


def test_the_error_in_the_metric_is_the_error_of_the_scores(projection):
    queries = random_keys(2000, 64, seed=5) @ random_keys(64, 64, seed=6)
    metric = (second_moment(queries) / len(queries)).float()  # E[q^T q] itself
    keys = random_keys(100, 64)
    encoded = encode(keys, projection, metric=metric)
    left = keys.double() - unpack_codes(encoded.codes, 64).double() @ projection.double()
    squared = (queries.double() @ left.T).square().mean(0)
    torch.testing.assert_close(encoded.error.double().square(), squared, rtol=1e-3, atol=1e-3)


def test_the_identity_metric_and_a_zero_mean_change_nothing(projection):
    keys = random_keys(3000, 64)
    plain, other = encode(keys, projection), encode(keys, projection, metric=torch.eye(64), mean=torch.zeros(64))
    assert torch.equal(plain.codes, other.codes)
    assert torch.equal(plain.gain, other.gain)
    torch.testing.assert_close(plain.error, other.error)


def test_gain_of_zero_opposed_and_tiny_keys():
    projection = torch.zeros(32, 4)
    projection[0] = torch.tensor([1.0, 0, 0, 0])
    keys = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 0], [2, 0, 0, 0], [0.25, 0, 0, 0], [-1, 3, 0, 0]])
    # zero key: gain 1; dot 0: largest gain; 4 / 2 = 2; 1/16 / 1/4 = 1/4, clamped to 0.5; 10 / 1, clamped
    assert encode(keys, projection).gain.tolist() == [32, 255, 96, 0, 255]


def test_gain_rounds_half_to_even():
    projection = torch.zeros(32, 2)
    projection[0, 0] = 1.0
    # <k, k^> = |k_0|, so a = k_0 + k_1^2 / k_0; the bytes would be 32.5 and 33.5
    keys = torch.tensor([[64.5 / 64, 0.0], [65.5 / 64, 0.0]])
    assert encode(keys, projection).gain.tolist() == [32, 34]


def test_a_zero_key_has_a_code_and_gain_one(projection):
    encoded = encode(torch.zeros(3, 64), projection)
    codes, _, _ = literal.encode(torch.zeros(3, 64), projection)
    assert torch.equal(unpack_codes(encoded.codes, 64).double(), codes)
    assert encoded.gain.eq(32).all()


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([32, 64, 128]),
    heads=st.integers(1, 4),
    count=st.integers(0, 50),
    dim=st.integers(1, 80),
    seed=st.integers(0, 1000),
)
def test_shapes_and_batches(bits, heads, count, dim, seed):
    keys = random_keys(2, heads, count, dim, seed=seed).double()
    projection = random_keys(heads, bits, dim, seed=seed + 1)
    encoded = encode(keys, projection)
    assert encoded.codes.shape == (2, heads, count, -(-bits // 64))
    assert (encoded.codes.dtype, encoded.error.dtype, encoded.gain.dtype) == (
        torch.int64,
        torch.float32,
        torch.uint8,
    )
    assert encoded.error.shape == encoded.gain.shape == (2, heads, count)
    for i in range(2):
        for head in range(heads):
            assert torch.equal(encoded.codes[i, head], encode(keys[i, head], projection[head]).codes)


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([32, 64, 128]), count=st.integers(0, 20), seed=st.integers(0, 1000))
def test_the_places_of_bits_in_the_words(bits, count, seed):
    positive = torch.rand(count, bits, generator=torch.Generator().manual_seed(seed)) < 0.5
    codes = pack_codes(positive)
    for row, words in zip(positive.tolist(), codes.tolist(), strict=True):
        as_python = sum(1 << i for i, bit in enumerate(row) if bit)
        assert as_python == sum((word & (2**64 - 1)) << (64 * w) for w, word in enumerate(words))
    assert torch.equal(unpack_codes(codes, bits) > 0, positive)


def test_refuses_a_metric_or_mean_that_does_not_fit():
    keys, projection = torch.ones(4, 8), torch.ones(64, 8)
    with pytest.raises(InputError, match=r"metric must be \[..., 8, 8\], not \[9, 9\]"):
        encode(keys, projection, metric=torch.eye(9))
    with pytest.raises(InputError, match=r"mean must be \[..., 8\], not \[7\]"):
        encode(keys, projection, mean=torch.ones(7))


def test_leading_dimensions_broadcast_both_ways():
    keys, projections = random_keys(30, 8), random_keys(3, 32, 8, seed=1)
    found = encode(keys, projections)
    assert found.codes.shape == (3, 30, 1)
    for head in range(3):
        alone = encode(keys, projections[head])
        assert torch.equal(found.codes[head], alone.codes)
        assert torch.equal(found.error[head], alone.error)
        assert torch.equal(found.gain[head], alone.gain)


@pytest.mark.parametrize(
    ("keys", "projection", "message"),
    [
        (torch.ones(4, 8), torch.ones(64, 9), "do not fit"),
        (torch.ones(4, 8), torch.ones(48, 8), "bits must be 32, 64 or 128"),
        (torch.ones(4, 8, dtype=torch.int8), torch.ones(64, 8), "keys must be floating"),
    ],
)
def test_refuses_bad_arguments(keys, projection, message):
    with pytest.raises(InputError, match=message):
        encode(keys, projection)
