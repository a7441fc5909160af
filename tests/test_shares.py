"""Shares of a budget by KV head: the least sum of losses for a mean, and the same numbers on every device."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from bpc_calib import BPCCache, enable
from bpc_calib.compat import with_cache
from bpc_calib.method.rules import Rules, spread
from bpc_calib.method.shares import GRID, LEAST, LEVELS, UNIT, counts, most, share_out

MEAN_OF = [2 ** -((level + 0.5) / 2) for level in range(LEVELS)]


def falling(heads, seed=0):
    """Needs of heads that differ by a factor of ten."""
    draw = np.random.default_rng(seed)
    pace = 10 ** draw.uniform(-2, 0, (heads, 1))
    return (draw.uniform(0.1, 1, (heads, 1)) * np.exp(-np.array(GRID) / pace)).astype(np.float32)


def lost(needs, shares):
    return sum(np.interp(share, GRID, need) for need, share in zip(needs, shares, strict=True))


def test_the_mean_is_kept_and_layers_keep_their_order():
    needs = {4: falling(3), 2: falling(5, seed=1)}
    found = share_out(needs)
    assert list(found) == [4, 2]
    assert [len(found[layer][0]) for layer in found] == [3, 5]
    together = np.concatenate([np.array(found[layer]) for layer in found], axis=1)
    assert together.shape == (2 * LEVELS, 8)
    np.testing.assert_allclose(np.delete(together.mean(1), [LEVELS - 1, 2 * LEVELS - 1]), UNIT, rtol=0.002)


def test_no_other_shares_lose_less():
    needs = falling(3, seed=3)
    convex = np.exp(-np.array(GRID) * 30) * np.array([[1.0], [0.3], [0.05]])  # on which the hull is the curve itself
    for each, level in itertools.product((needs, convex), (3, 6, 9, 11)):
        mean = MEAN_OF[level]
        found = np.array(share_out({0: each.astype(np.float32)})[0][level]) / UNIT * mean
        best = lost(each, found)
        draw = np.random.default_rng(level)
        for _ in range(3000):
            other = draw.dirichlet(np.full(3, 0.5)) * 3 * mean
            if other.max() <= 1 and other.min() >= max(GRID[0], mean / 8):
                assert lost(each, other) >= best - 0.01 * abs(best)


def test_equal_needs_are_met_equally_where_they_are_convex():
    need = np.exp(-np.array(GRID) * 10)
    found = np.array(share_out({0: np.stack([need] * 4).astype(np.float32)})[0])
    assert abs(found[0] / UNIT - 1).max() < 0.5
    assert found.sum(1).max() <= 4 * UNIT + 4


def test_a_head_without_need_gets_the_least():
    needs = falling(3)
    needs[1] = 0
    shares = np.array(share_out({0: needs})[0])
    assert (shares[:, 1] <= shares[:, [0, 2]].min(1)).all()


@given(st.integers(1, 1 << 20) | st.integers(4080, 4110), st.integers(1, 1 << 20), st.integers(0, 5))
def test_the_same_numbers_on_a_device(length, mean, seed):
    mean = min(mean, length)
    short = {0: falling(4, seed + 20), 1: falling(4, seed + 30)} if seed % 2 else None
    shares = share_out({0: falling(4, seed), 1: falling(4, seed + 10)}, short)
    table = torch.tensor([shares[0], shares[1]])
    found = spread(torch.tensor([mean, 1, length]), torch.tensor([length] * 3), table)
    for layer, (row, each) in itertools.product((0, 1), enumerate((mean, 1, length))):
        expected = counts(each, length, shares[layer])
        assert found[layer, row].tolist() == list(expected)
        assert min(LEAST, each) <= min(expected) <= max(expected) <= most(each, length, shares[layer]) <= length


@pytest.mark.parametrize(
    ("length", "mean"), [(700, 20), (2048, 10), (2048, 41), (8192, 164), (131_072, 2621), (600, 180)]
)
def test_heads_attend_to_the_mean_together(length, mean):
    shares = share_out({0: falling(8), 1: falling(8, 1)})
    found = [count for each in shares.values() for count in counts(mean, length, each)]
    assert sum(found) / len(found) == pytest.approx(mean, abs=0.5, rel=0.005)
    assert min(found) >= max(min(16, mean), mean // 8)


def test_short_contexts_have_shares_of_their_own():
    long, short = ({0: falling(4, seed), 3: falling(4, seed + 1)} for seed in (5, 7))
    both, alone, other = share_out(long, short), share_out(long), share_out(short)
    for layer in long:
        for length in (1024, 4095, 4096, 100_000):
            own = (other if length < 4096 else alone)[layer]
            assert counts(length // 50, length, both[layer]) == counts(length // 50, length, own)


def test_rows_without_tokens_divide_by_nothing():
    shares = torch.tensor([share_out({0: falling(2)})[0]])
    assert spread(torch.tensor([0]), torch.tensor([0]), shares).tolist() == [[[0, 0]]]


def test_a_cache_spends_the_budget_by_need():
    model = tiny.model()
    enable(model)
    artifact = tiny.artifact(model.config, needs=True)
    ids = torch.randint(250, (1, 600), generator=torch.Generator().manual_seed(0))
    read = {}
    for equal in (False, True):
        cache = BPCCache(model.config, artifact, budget=0.1, min_tokens=1, equal_shares=equal)
        model(ids[:, :-1], **with_cache(cache))
        model(ids[:, -1:], **with_cache(cache))
        assert all(layer.codebook is not None for layer in cache.layers)  # no layer is dense by default
        parts = cache.kv_parts(600)
        assert parts.minimum == parts.dense == 0
        read[equal] = parts.chosen
        k = [layer.counts(600) for layer in cache.layers]
        assert (len({each for some in k for each in some}) == 1) == equal
    assert read[False] == pytest.approx(read[True], rel=0.05)


def test_without_needs_the_first_layers_are_dense_as_before():
    config = tiny.config()
    layers = BPCCache(config, tiny.artifact(config)).layers
    assert [type(layer).__name__ for layer in layers[:2]] == ["DenseLayer"] * 2
    assert all(layer.rules.shares is None for layer in layers)


def test_short_sequences_attend_to_everything():
    rules = Rules(budget=0.02, min_tokens=128, shares=share_out({0: falling(4)})[0])
    assert counts(rules.count(128), 128, rules.shares) == (128,) * 4
    assert rules.most(100) == 100
    assert rules.most(10_000) == replace(rules).most(10_000) <= 10_000
