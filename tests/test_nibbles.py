"""The search for nibbles: its codes, errors and gains against literal sums of vectors."""

import pytest
import torch
from test_decomposition import random_keys

from bpc_calib import InputError
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.encoding import encode_with
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
    keys, vectors = random_keys(500, 16), random_keys(16, 16, 16, seed=1) / 3
    left = keys.clone()
    for stage in vectors:
        left = left - stage[torch.cdist(left, stage).argmin(-1)]
    found = encode_with(make_codebook(vectors.flatten(0, 1), torch.float32, nibbles=True), keys)
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
