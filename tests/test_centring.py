"""Calibrated projections hash the keys of each sequence around their own mean."""

import copy

import pytest
import tiny
import torch

from bpc_calib import BPCCache
from bpc_calib.method.encoding import encode_with, make_encoder
from bpc_calib.method.fitting import fit
from bpc_calib.method.product import Product
from bpc_calib.runtime.centring import CALIBRATED_WEIGHT, centred_on, own_mean

DRIFT = 3.0  # how far the keys of these texts lie from the calibrated mean


def some_keys(batch=1, tokens=400, dim=32):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(batch, 2, tokens, dim, generator=generator) + DRIFT


def encoders(dim=32):
    """Encoders that were fitted to keys around 0."""
    keys = some_keys(tokens=2048) - DRIFT
    signs = fit(keys[0], iterations=2, centred=True, generator=torch.Generator().manual_seed(3))
    basis = torch.linalg.qr(torch.randn(2, dim, dim, generator=torch.Generator().manual_seed(4))).Q
    centroids = (keys[0, :, :256] @ basis.mT).unflatten(-1, (8, -1)).transpose(1, 2)
    return {
        "signs": make_encoder(signs.projection, torch.float32, mean=signs.mean),
        "product": make_encoder(Product(basis, centroids), torch.float32, mean=signs.mean),
    }


def hashing_layer(codes):
    config = tiny.config(head_dim=32)
    artifact = tiny.artifact(config, codes=codes, metric=True, centred=True)
    return BPCCache(config, artifact, budget=0.1, dense_layers=()).layers[1]


def test_the_mean_of_a_sequence():
    keys, calibrated = some_keys(), torch.zeros(2, 32)
    wanted = keys.double().sum(2) / (400 + CALIBRATED_WEIGHT)
    assert own_mean(keys, None, calibrated).dtype == torch.float32
    torch.testing.assert_close(own_mean(keys, None, calibrated).double(), wanted, rtol=1e-6, atol=1e-7)
    few = own_mean(keys[:, :, :2], None, calibrated)
    assert few.abs().max() < 0.02 * DRIFT * 2  # two keys hardly move the calibrated mean


def test_padding_does_not_count():
    keys, calibrated = some_keys(batch=2), torch.ones(2, 32)
    visible = torch.arange(400) >= torch.tensor([[0], [150]])
    keys[1, :, :150] = 1e4
    found = own_mean(keys, visible, calibrated)
    assert torch.equal(found[:1], own_mean(keys[:1], None, calibrated))
    assert torch.equal(found[1:], own_mean(keys[1:, :, 150:], None, calibrated))


def test_a_long_sequence_has_the_mean_of_keys_all_over_it():
    keys, calibrated = some_keys(tokens=5000), torch.zeros(2, 32)
    keys += torch.linspace(-5, 5, 5000)[:, None]
    found = own_mean(keys, None, calibrated)
    assert (found - keys.mean(2)).abs().max() < 0.18  # the calibrated mean weighs 0.07, the noise of 1,024 keys 0.03
    visible = torch.arange(5300) >= 300
    padded = torch.cat([keys[:, :, :300] + 1e4, keys], 2)
    assert torch.equal(own_mean(padded, visible[None], calibrated), found)


def test_a_sequence_of_nothing_has_the_calibrated_mean():
    calibrated = torch.ones(2, 32)
    visible = torch.zeros(1, 400, dtype=torch.bool)
    assert torch.equal(own_mean(some_keys(), visible, calibrated), calibrated[None])


@pytest.mark.parametrize("codes", ["signs", "product"])
def test_sequences_of_a_batch_are_hashed_as_alone(codes):
    keys, encoder = some_keys(batch=3), encoders()[codes]
    together = encode_with(centred_on(keys, None, encoder), keys)
    for row in range(3):
        own = keys[row : row + 1]
        alone = encode_with(centred_on(own, None, encoder), own)
        assert torch.equal(alone.codes, together.codes[row : row + 1])
        assert torch.equal(alone.gain, together.gain[row : row + 1])


@pytest.mark.parametrize("codes", ["signs", "product"])
def test_the_own_mean_leaves_a_smaller_error(codes):
    keys, encoder = some_keys(), encoders()[codes]
    before, after = encode_with(encoder, keys).error, encode_with(centred_on(keys, None, encoder), keys).error
    assert after.mean() < 0.7 * before.mean()


def test_projections_without_a_mean_stay_as_they_are():
    encoder = make_encoder(torch.randn(2, 64, 32), torch.float32)
    assert centred_on(some_keys(), None, encoder) is encoder


@pytest.mark.parametrize("codes", ["signs", "product"])
def test_the_mean_is_that_of_the_first_step_and_follows_its_sequence(codes):
    layer = hashing_layer(codes)
    keys = some_keys(batch=3)
    layer.update(keys, keys)
    layer.hash(None)
    first = layer.encoder
    layer.update(keys[:, :, :40] - 9, keys[:, :, :40])
    layer.hash(None)
    assert layer.encoder is first
    assert torch.equal(layer.buffers["codes"][:, :, 400:440], encode_with(first, keys[:, :, :40] - 9).codes)
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(layer.encoder.mean, first.mean[[2, 0, 0]])
    layer.batch_select_indices(torch.tensor([0]))
    assert torch.equal(layer.encoder.mean, first.mean[[2]])
    layer.crop(-layer.get_seq_length())
    assert layer.encoder is None


def test_one_sequence_that_is_repeated_keeps_its_mean():
    layer = hashing_layer("signs")
    keys = some_keys()
    layer.update(keys, keys)
    layer.hash(None)
    alone = copy.copy(layer.encoder)
    layer.batch_repeat_interleave(3)
    layer.update(keys[:, :, :1].repeat(3, 1, 1, 1), keys[:, :, :1].repeat(3, 1, 1, 1))
    layer.hash(None)
    expected = encode_with(alone, keys[:, :, :1]).codes
    assert torch.equal(layer.buffers["codes"][:, :, 400:401], expected.expand(3, -1, -1, -1))
