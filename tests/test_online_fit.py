"""Online projections: which queries are kept of a prompt, and what the fit makes of them."""

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

import bpc_calib
from bpc_calib.compat import with_cache
from bpc_calib.method.fitting import fit, mean_key
from bpc_calib.method.metric import score_metric, second_moment
from bpc_calib.runtime import hashed_layer
from bpc_calib.runtime.online_fit import (
    ASKED,
    FITTED,
    ITERATIONS,
    NEWEST,
    ROUNDS,
    fit_online,
    join,
    observed_places,
    spread,
)


@given(st.integers(1, 100_000), st.integers(1, 5000))
def test_spread_indices_ascend_evenly_to_the_last(count, most):
    places = spread(count, most)
    assert len(places) == min(count, most)
    assert places[-1] == count - 1
    gaps = torch.diff(places, prepend=torch.tensor([-1]))
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


@given(st.integers(1, 20_000))
def test_the_newest_queries_are_all_kept(count):
    places = observed_places(count)
    assert len(places) == min(count, ASKED)
    assert places.diff().gt(0).all()
    assert torch.equal(places[-NEWEST:], torch.arange(max(0, count - NEWEST), count))


def made(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_chunks_keep_their_queries_with_their_places():
    queries = made(1, 2, 2000, 4, seed=0)
    asked = None
    for places in torch.arange(2000).split(300):
        asked = join(asked, queries[:, :, places], places)
        assert len(asked.places) <= ASKED
    assert torch.equal(asked.queries, queries[:, :, asked.places])
    assert torch.equal(asked.places[-NEWEST:], torch.arange(2000 - NEWEST, 2000))
    assert asked.places[0] < 300  # the first chunk is not forgotten


def by_hand(keys, queries, bits=32):
    metric = score_metric(second_moment(queries))
    generator = torch.Generator().manual_seed(7)
    return fit(
        keys, bits, iterations=ITERATIONS, rounds=ROUNDS, metric=metric, mean=mean_key(keys), generator=generator
    )


def test_a_long_prompt_is_fitted_to_some_of_its_keys_in_the_metric_of_some_queries():
    length = 3 * FITTED + 5
    keys, queries = made(1, 2, length, 8, seed=1), made(1, 4, length, 8, seed=2)
    found = fit_online(keys, join(None, queries, torch.arange(length)), None, 32, 7)
    some = queries[0].unflatten(0, (2, 2))[:, :, observed_places(length)].flatten(1, 2)
    wanted = by_hand(keys[0, :, spread(length, FITTED)], some)
    assert torch.equal(found.projection[0], wanted.projection)
    assert torch.equal(found.mean[0], wanted.mean)


def test_padding_has_no_part_in_the_fit():
    keys, queries = made(2, 1, 100, 8, seed=3), made(2, 2, 100, 8, seed=4)
    visible = torch.arange(100).expand(2, -1) >= torch.tensor([[0], [36]])
    keys[1, :, :36], queries[1, :, :36] = 1e4, 1e4
    found = fit_online(keys, join(None, queries, torch.arange(100)), visible, 32, 7)
    for row, first in ((0, 0), (1, 36)):
        wanted = by_hand(keys[row, :, first:], queries[row, :, first:].flatten(0, 1)[None])
        torch.testing.assert_close(found.metric[row], wanted.metric, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.mean[row], wanted.mean, rtol=1e-5, atol=1e-6)
        assert float(found.residual_norms[row, 0, -1]) == pytest.approx(float(wanted.residual_norms[0, -1]), rel=0.02)


def test_without_queries_the_fit_is_centred_and_has_no_metric():
    keys = made(1, 1, 200, 8, seed=5) + 3
    found = fit_online(keys, None, None, 32, 7)
    assert found.metric is None
    torch.testing.assert_close(found.mean[0, 0], keys[0, 0].mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("at_once", [1, 8, 64])
def test_layers_are_fitted_together_as_they_are_alone(at_once, padded, monkeypatch):
    """The same bytes, with 3 layers of 4 heads: one layer at a time, two and one, all."""
    monkeypatch.setattr(hashed_layer, "HEADS_AT_ONCE", at_once)
    model = tiny.model("llama")
    bpc_calib.enable(model)
    ids, mask = torch.randint(250, (2, 300), generator=torch.Generator().manual_seed(0)), torch.ones(2, 300)
    mask[0, : 100 * padded] = 0
    caches = [bpc_calib.BPCCache(model.config, budget=20, min_tokens=1, dense_layers=()) for _ in range(2)]
    for cache in caches:
        with torch.no_grad():
            model(ids, attention_mask=mask, **with_cache(cache))
    caches[0].prepare(mask)
    for together, alone in zip(*(cache.layers for cache in caches), strict=True):
        alone.prepare(mask)
        assert torch.equal(together.codebook.projection, alone.codebook.projection)
        assert torch.equal(together.codebook.mean, alone.codebook.mean)
        assert torch.equal(together.codebook.metric, alone.codebook.metric)
        assert torch.equal(together.buffers["codes"][:, :, :300], alone.buffers["codes"][:, :, :300])
        assert together.asked is None
    with pytest.raises(bpc_calib.InputError, match=r"must be \[2, 300\] like the cache, not \[2, 7\]"):
        caches[0].prepare(mask[:, :7])
