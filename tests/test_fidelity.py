"""The metrics of a choice of tokens, compared with sums written out in float64."""

import itertools
import math
import random

import pytest
import tiny
import torch

from bpc_calib import BPCCache, enable
from bpc_calib.evaluation.comparison import make_cache
from bpc_calib.evaluation.fidelity import METRICS, FullAttention, probe
from bpc_calib.evaluation.forcing import force, fork, prefill
from bpc_calib.evaluation.methods import METHODS
from bpc_calib.evaluation.statistics import mean, proportion
from bpc_calib.method.rules import shares_of
from bpc_calib.method.shares import counts


def by_hand(query, keys, values, chosen, scaling):
    """Return the four metrics of one KV head, computed from lists of numbers."""
    products = [[sum(a * b for a, b in zip(q, k, strict=True)) for k in keys] for q in query]
    whole = [math.log(sum(math.exp(scaling * p) for p in row)) / scaling for row in products]
    below = [[row[i] - each for row, each in zip(products, whole, strict=True)] for i in range(len(keys))]
    best_of_group = [4 * len(query) * max(column) + sum(max(r, -16 / scaling) for r in column) for column in below]
    true = sorted(range(len(keys)), key=lambda i: (-best_of_group[i], i))[: len(chosen)]
    found = {"recall": len(set(true) & set(chosen)) / len(chosen), "mass": 0.0, "best_kept": 0.0, "cosine": 0.0}
    for row in products:
        weights = [math.exp(scaling * p) for p in row]
        total = sum(weights)
        found["mass"] += sum(weights[i] for i in chosen) / total / len(query)
        found["best_kept"] += (row.index(max(row)) in chosen) / len(query)

        def output(places, weights=weights):
            norm = sum(weights[i] for i in places)
            return [sum(weights[i] * values[i][d] for i in places) / norm for d in range(len(values[0]))]

        full, sparse = output(range(len(keys))), output(chosen)
        dot = sum(a * b for a, b in zip(full, sparse, strict=True))
        found["cosine"] += dot / math.sqrt(sum(a * a for a in full) * sum(b * b for b in sparse)) / len(query)
    return [found[name] for name in METRICS]


@pytest.mark.parametrize("scaling", [None, 0.7])
def test_metrics_are_the_sums_of_their_definitions(scaling):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 3, 2, 8), (2, 3, 20, 8), (2, 3, 20, 8))
    )
    rng = random.Random(0)
    chosen = torch.tensor([[sorted(rng.sample(range(20), 5)) for _ in range(3)] for _ in range(2)])
    found = FullAttention(query, keys, values, scaling).kept(chosen)
    assert found.shape == (2, 3, 4)
    for row in range(2):
        for head in range(3):
            cases = (query, keys, values, chosen)
            expected = by_hand(*(x[row, head].tolist() for x in cases), 8**-0.5 if scaling is None else scaling)
            assert found[row, head].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_metrics_of_heads_that_attend_to_different_numbers():
    generator = torch.Generator().manual_seed(4)
    query, keys, values = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 3, 2, 8), (2, 3, 20, 8), (2, 3, 20, 8))
    )
    rng = random.Random(1)
    lists = [[sorted(rng.sample(range(20), k)) for k in (7, 2, 1)] for _ in range(2)]
    padded = torch.tensor([[each + [-1] * (7 - len(each)) for each in row] for row in lists])
    found = FullAttention(query, keys, values).kept(padded)
    for row, head in itertools.product(range(2), range(3)):
        cases = (x[row, head].tolist() for x in (query, keys, values))
        expected = by_hand(*cases, lists[row][head], 8**-0.5)
        assert found[row, head].tolist() == pytest.approx(expected, abs=1e-12)


def test_choosing_all_tokens_keeps_everything():
    keys = torch.randn(1, 1, 9, 4, generator=torch.Generator().manual_seed(1))
    found = FullAttention(keys[:, :, :2], keys, keys).kept(torch.arange(9).expand(1, 1, 9))
    torch.testing.assert_close(found, torch.ones(1, 1, 4))


def test_a_choice_without_the_one_important_key_keeps_nothing():
    keys = torch.zeros(1, 1, 10, 4)
    keys[0, 0, 3] = 40.0  # all weight is here
    values = torch.eye(10).unsqueeze(0).unsqueeze(0)[..., :4].contiguous()
    query = torch.ones(1, 1, 1, 4)
    full = FullAttention(query, keys, values)
    hit, miss = (full.kept(torch.tensor([[[i]]])) for i in (3, 0))
    torch.testing.assert_close(hit[0, 0], torch.ones(4))
    torch.testing.assert_close(miss[0, 0], torch.zeros(4), atol=1e-6, rtol=0)


def test_a_probe_measures_every_method_and_does_not_change_decoding():
    model = tiny.model()
    enable(model)
    ids = torch.arange(60).reshape(1, 60) % 250
    other = ("full", "bpc", "magicpig-own", "twilight", "twilight-own", "spotlight", "hata", "compresskv")
    names = [name for name in METHODS if name not in other]
    rules = {"min_tokens": 1, "dense_layers": (), "seed": 0}
    caches = {name: make_cache(name, model.config, None, 12, **rules) for name in names}
    cache = probe(model.config, caches)
    prefix = prefill(model, ids[:, :50])
    with_probe = force(model, fork(prefix, cache), ids[:, 50:])
    plain = force(model, fork(prefix, BPCCache(model.config, budget=1.0, dense_layers=())), ids[:, 50:])
    torch.testing.assert_close(with_probe, plain)
    found = cache.found()
    assert list(found) == names
    for name, figures in found.items():
        assert figures.shape == (3, 1, 2, 4), name
        assert ((figures[..., :3] >= 0) & (figures[..., :3] <= 1)).all(), name
    mass = {name: float(figures[..., 1].mean()) for name, figures in found.items()}
    assert max(mass, key=mass.get) == "oracle"
    assert mass["bpc-online"] > mass["random"] + 0.05
    assert cache.asked_layers() == [0, 1, 2]


def test_a_probe_asks_each_head_for_its_share(monkeypatch):
    model = tiny.model()
    enable(model)
    artifact, ids = tiny.artifact(model.config, needs=True), torch.arange(200).reshape(2, 100) % 250
    rules = {"min_tokens": 1, "dense_layers": ()}
    caches = {name: make_cache(name, model.config, artifact, 0.4, **rules) for name in ("oracle", "bpc", "window")}
    asked = []
    kept = FullAttention.kept
    monkeypatch.setattr(FullAttention, "kept", lambda self, indices: asked.append(indices) or kept(self, indices))
    cache = probe(model.config, caches)
    force(model, fork(prefill(model, ids[:, :-1]), cache), ids[:, -1:])
    shares = shares_of(artifact, range(3))
    for layer in range(3):
        by_need = counts(40, 100, shares[layer])
        assert len(set(by_need)) == 2
        for name, indices in zip(caches, asked[3 * layer :], strict=False):
            assert (indices >= 0).sum(-1).tolist() == [[40, 40] if name == "window" else list(by_need)] * 2, name
    torch.testing.assert_close(cache.found()["oracle"][..., 0], torch.ones(3, 2, 2, dtype=torch.float64))


def test_a_probe_of_every_third_step_is_the_mean_over_those_steps():
    model = tiny.model()
    enable(model)
    ids = torch.arange(60).reshape(1, 60) % 250
    prefix = prefill(model, ids[:, :50])

    def found(every, tokens):
        cache = probe(
            model.config, {0: make_cache("oracle", model.config, None, 12, min_tokens=1, dense_layers=())}, every
        )
        force(model, fork(prefix, cache), ids[:, 50 : 50 + tokens])
        return cache.found()[0]

    sums = [found(1, tokens) * tokens for tokens in range(1, 8)]
    steps = [sums[0], sums[3] - sums[2], sums[6] - sums[5]]  # the first, fourth and seventh
    torch.testing.assert_close(found(3, 8), sum(steps) / 3)


def test_wilsons_interval():
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        found = proportion(right, count)
        assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-4)
        assert found["value"] == pytest.approx(right / count, abs=1e-6)


def test_the_interval_of_a_mean():
    found = mean([1.0, 2.0, 3.0, 4.0])
    error = math.sqrt(5 / 3 / 4)
    assert found == pytest.approx({"value": 2.5, "low": 2.5 - 1.96 * error, "high": 2.5 + 1.96 * error}, abs=1e-6)
