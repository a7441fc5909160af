"""The search for nibbles: its codes, errors and gains against literal sums of vectors."""

import math

import pytest
import torch
from test_decomposition import random_keys

from bpc_calib import InputError
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.fitting import fit
from bpc_calib.method.nibble_fitting import fit_nibbles, nibble_residuals
from bpc_calib.method.nibbles import named, unpack_nibbles


def summed(codes: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """The sums that codes `[N, W]` stand for, float64 `[N, D]`, of vectors `[R, D]`."""
    return vectors.double()[named(unpack_nibbles(codes, len(vectors) // 4))].sum(-2)


@pytest.mark.parametrize("bits", [32, 64, 128])
@pytest.mark.parametrize("centred", [False, True])
def test_errors_and_gains_are_those_of_the_sum(bits, centred):
    keys, vectors = random_keys(300, 24), random_keys(4 * bits, 24, seed=1) / 4
    root = random_keys(24, 24, seed=2)
    metric = root @ root.T / 24 + 0.1 * torch.eye(24) if centred else torch.eye(24)
    mean = keys.mean(0) if centred else torch.zeros(24)
    given = {"metric": metric, "mean": mean} if centred else {}
    found = encode_with(make_codebook(vectors, torch.float32, nibbles=True, **given), keys)
    wide, approximated, weight = (keys - mean).double(), summed(found.codes, vectors), metric.double()
    error = (((wide - approximated) @ weight) * (wide - approximated)).sum(-1).clamp(min=0).sqrt()
    torch.testing.assert_close(found.error.double(), error, rtol=1e-3, atol=1e-3)
    gain = ((wide @ weight) * wide).sum(-1) / ((wide @ weight) * approximated).sum(-1)
    gain = torch.where(gain > 0, gain.clamp(0.5, 287 / 64), 287 / 64)
    assert ((found.gain.double() + 32) / 64 - gain).abs().max() < 0.5 / 64 + 1e-3


def test_a_wider_search_than_one_partial_code_finds_nearer_sums():
    keys = random_keys(1, 2000, 16)
    vectors = fit_nibbles(keys, 64, rounds=0).projection[0]
    left = keys[0].clone()
    for stage in vectors.unflatten(0, (16, 16)):
        left = left - stage[torch.cdist(left, stage).argmin(-1)]
    found = encode_with(make_codebook(vectors, torch.float32, nibbles=True), keys[0])
    assert found.error.square().mean() < 0.85 * left.square().sum(-1).mean()


def test_equal_vectors_are_taken_by_their_number():
    vectors = torch.ones(16, 16, 8)
    found = encode_with(make_codebook(vectors.flatten(0, 1), torch.float32, nibbles=True), random_keys(20, 8))
    assert found.codes.eq(0).all()


def test_blocks_and_leading_dimensions_change_nothing():
    keys, vectors = random_keys(2, 3, 5000, 16), random_keys(3, 256, 16, seed=1)
    codebook = make_codebook(vectors, torch.float64, nibbles=True)
    found = encode_with(codebook, keys.double())
    for b, h, n in ((0, 0, 0), (1, 2, 2048), (1, 1, 4999)):
        alone = encode_with(make_codebook(vectors[h], torch.float64, nibbles=True), keys[b, h, n : n + 1].double())
        assert torch.equal(alone.codes, found.codes[b, h, n : n + 1])
        assert torch.equal(alone.gain, found.gain[b, h, n : n + 1])


def test_refuses_other_numbers_of_vectors():
    with pytest.raises(InputError, match="bits must be 32, 64 or 128, not 48"):
        make_codebook(torch.ones(192, 8), torch.float32, nibbles=True)
    with pytest.raises(InputError, match="vectors of nibbles must be"):
        make_codebook(torch.ones(66, 8), torch.float32, nibbles=True)


def clustered(heads: int, count: int, dim: int) -> torch.Tensor:
    """Keys that a few vectors describe well, `[heads, count, dim]`."""
    place = torch.randint(20, (heads, count, 1), generator=torch.Generator().manual_seed(3)).expand(-1, -1, dim)
    return 2 * random_keys(heads, 20, dim, seed=1).gather(1, place) + random_keys(heads, count, dim)


def residual(found) -> torch.Tensor:
    return found.residual_norms[..., -1] / found.residual_norms[..., 0]


def test_rounds_of_least_squares_lower_the_residual_and_nibbles_beat_signs():
    keys = clustered(2, 3000, 24)
    none, some = fit_nibbles(keys, 32, rounds=0), fit_nibbles(keys, 32, rounds=4)
    assert (residual(some) < 0.99 * residual(none)).all()
    assert (residual(some) < 0.95 * residual(fit(keys, 32, rounds=6))).all()
    assert (some.residual_norms.diff(dim=-1) < 0).all()  # every nibble helps


def test_a_fit_says_what_its_codes_are_worth():
    keys, fresh = clustered(2, 3000, 24), clustered(2, 4000, 24)[:, 3000:]
    root = random_keys(2, 48, 24, seed=5)
    metric, mean = root.mT @ root / 48 + 0.1 * torch.eye(24), keys.mean(1)
    found = fit_nibbles(keys, 64, rounds=2, metric=metric, mean=mean)
    codebook = make_codebook(found.projection, torch.float32, metric=metric, mean=mean, nibbles=True)
    for some, norms in (
        (keys, found.residual_norms),
        (fresh, nibble_residuals(fresh, found.projection, metric=metric, mean=mean)),
    ):
        errors = encode_with(codebook, some).error.double().square().sum(-1).sqrt()
        torch.testing.assert_close(norms[..., -1], errors, rtol=1e-4, atol=0)
        wide = (some - mean.unsqueeze(1)).double()
        torch.testing.assert_close(
            norms[..., 0], ((wide @ metric.double()) * wide).sum((-2, -1)).sqrt(), rtol=1e-6, atol=0
        )
    assert norms[..., -1].lt(0.4 * norms[..., 0]).all()  # of fresh keys


def test_a_fit_is_that_of_each_head_alone():
    keys = clustered(3, 500, 16).double()
    found, alone = fit_nibbles(keys, 32, rounds=1), fit_nibbles(keys[1:2], 32, rounds=1)
    torch.testing.assert_close(residual(alone), residual(found)[1:2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_few_or_equal_keys_are_described_exactly(count):
    keys = random_keys(1, count, 8)
    for some in (keys, keys[:, :1].expand(-1, count, -1), torch.zeros(1, count, 8)):
        found = fit_nibbles(some.clone(), 64, rounds=1)
        assert found.projection.isfinite().all()
        assert found.residual_norms[0, -1] <= 0.05 * found.residual_norms[0, 0] + 1e-6


def test_a_fit_refuses_what_is_no_keys():
    with pytest.raises(InputError, match="NaN or infinity"):
        fit_nibbles(torch.full((1, 9, 8), math.nan))
    with pytest.raises(InputError, match="bits must be"):
        fit_nibbles(torch.ones(1, 9, 8), 48)
