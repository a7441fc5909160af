"""Methods with learned hashes: their codes, scores and losses in plain loops, and what learning is good for."""

import math

import pytest
import tiny
import torch

from bpc_calib import describe
from bpc_calib.evaluation.baselines import hashing, hata, spotlight
from bpc_calib.evaluation.baselines.bounds import OracleLayer
from bpc_calib.evaluation.baselines.hata import HataLayer
from bpc_calib.evaluation.baselines.signs import SignsLayer
from bpc_calib.evaluation.baselines.spotlight import SpotlightLayer
from bpc_calib.evaluation.learning import REPEATED, LayerText
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows
from bpc_calib.runtime.layers import Common

MODEL = describe(tiny.config(head_dim=16))
KV_HEADS, GROUP, HEAD_DIM, TEXTS, LENGTH = 2, 2, 16, 4, 512
KINDS = (SpotlightLayer, HataLayer)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def heads(count, length, seed):
    """Return keys and queries of a few clusters, with means that differ.

    In half of the directions keys vary most, but queries hardly use these, so that random signs tell less.
    """
    drawn = generator(99)
    centres = torch.randn(KV_HEADS, 24, HEAD_DIM, generator=drawn)
    centres[:, :, HEAD_DIM // 2 :] = 0
    mean_key = torch.randn(KV_HEADS, HEAD_DIM, generator=drawn)
    mean_query = torch.randn(KV_HEADS, GROUP, HEAD_DIM, generator=drawn)
    mean_query[..., HEAD_DIM // 2 :] /= 10
    drawn = generator(seed)

    def points(noise, *shape):
        of = torch.randint(24, (count, KV_HEADS, *shape), generator=drawn)
        near = torch.stack([3 * centres[head][of[:, head]] for head in range(KV_HEADS)], dim=1)
        spread = torch.tensor([0.3, noise]).repeat_interleave(HEAD_DIM // 2)
        return near + spread * torch.randn(near.shape, generator=drawn)

    keys = points(5.0, length) + mean_key[:, None]
    queries = points(0.1, GROUP, length) + mean_query[:, :, None]
    return 5 * keys, 5 * queries


@pytest.fixture(scope="module")
def text():
    keys, queries = heads(TEXTS, LENGTH, 0)
    places = torch.cat([torch.arange(3, LENGTH - REPEATED, 5), torch.arange(LENGTH - REPEATED, LENGTH)])
    queries = queries.flatten(1, 2)[:, :, places]
    return LayerText(keys, torch.randn_like(keys), queries, places, (LENGTH - REPEATED) // 2, HEAD_DIM**-0.5)


@pytest.fixture(scope="module")
def learned(text):
    with torch.inference_mode():  # as the evaluation may call it
        copied = LayerText(text.keys.clone(), text.values, text.queries.clone(), text.places, 0, text.scaling)
        return {kind: kind.learn(copied, 0) for kind in KINDS}


def made(kind, learned=None, keys=None, bits=128):
    """Return a layer with keys, of the class that a comparison makes."""
    layer_class = type(kind.__name__, (kind,), {"learned": {0: learned}, "BITS": bits})
    layer = layer_class(0, Rules(12, min_tokens=1, recent=1, group="max"), Common(MODEL, layers=(0,)), None)
    layer.update(keys, keys)
    return layer


def products_by_hand(vector, weight):
    return [sum(float(x) * w for x, w in zip(vector, column, strict=True)) for column in weight.T.tolist()]


def code_by_hand(kind, learned, vector, head, g=None):
    """Return the 128 bits of a key of a KV head, or of a query of its group."""
    if kind is HataLayer:
        sums = products_by_hand(vector, learned["weight"][head])
    else:
        name, at = ("key", head) if g is None else ("query", (head, g))
        inside = products_by_hand(vector, learned[f"{name}_in"][at])
        hidden = [x / (1 + math.exp(-x)) for x in inside]
        outer = products_by_hand(hidden, learned[f"{name}_out"][at])
        sums = [a + b for a, b in zip(outer, hidden, strict=True)]
    return [x >= 0 for x in sums]


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_counts_equal_bits(kind, learned):
    keys, queries = heads(1, 20, 1)
    layer = made(kind, learned[kind], keys)
    query = queries[:, :, :, 19]
    scores = layer.score(query)
    assert scores.shape == (1, KV_HEADS, GROUP, 20)
    found = {}
    for head in range(KV_HEADS):
        for token in (1, 7, 19):
            key_code = code_by_hand(kind, learned[kind], keys[0, head, token], head)
            for g in range(GROUP):
                query_code = code_by_hand(kind, learned[kind], query[0, head, g], head, g)
                equal = sum(a == b for a, b in zip(key_code, query_code, strict=True))
                found[head, token, g] = equal
                assert scores[0, head, g, token] == 2 * equal - 128
    assert len(set(found.values())) > 3
    assert bool((scores[..., 0] == 129).all()) == (kind is SpotlightLayer)  # the first token is always attended
    assert layer.ranking_bytes(20) == 20 * KV_HEADS * 16


def test_a_perceptron_has_a_residual_where_sizes_agree():
    vectors = torch.randn(3, 128, generator=generator(0), dtype=torch.float64)
    inner, outer = torch.randn(2, 128, 128, generator=generator(1), dtype=torch.float64)
    inside = vectors @ inner
    hidden = inside * inside.sigmoid() + vectors
    torch.testing.assert_close(spotlight.perceptron(vectors, inner, outer), hidden @ outer + hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_new_keys_are_hashed_and_the_best_and_the_newest_chosen(kind, learned):
    keys, queries = heads(1, 60, 2)
    layer = made(kind, learned[kind], keys[:, :, :50])
    layer.score(queries[:, :, :, 49])
    layer.update(keys[:, :, 50:], keys[:, :, 50:])
    query = queries[:, :, :, 59]
    scores = layer.score(query)
    assert torch.equal(scores, made(kind, learned[kind], keys).score(query))
    assert layer.buffers["signs"].dtype == torch.int8
    chosen = layer.choose(query, Rows(torch.tensor([60]), torch.tensor([[12]]), 60, 12, None))
    for head in range(KV_HEADS):
        best = scores[0, head].amax(0)[:59]
        order = sorted(range(59), key=lambda token, best=best: -best[token])[:11]  # of equals, the first
        assert chosen[0, head].tolist() == sorted([*order, 59])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes(kind, text, learned, monkeypatch):
    monkeypatch.setattr({HataLayer: hata, SpotlightLayer: spotlight}[kind], "STEPS", 3)
    one, again, other = (kind.learn(text, seed) for seed in (0, 0, 1))
    assert one.keys() == learned[kind].keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
        assert not tensor.requires_grad


def recall(layer, queries):
    """Return the share of the 16 keys with the largest products that are among the 16 with the best scores."""
    found = []
    for place in range(0, queries.shape[3], 8):
        query = queries[:, :, :, place]
        best = (query @ layer.keys.mT).topk(16).indices
        own = layer.score(query).topk(16).indices
        found.append((best[..., None] == own[..., None, :]).any(-1).float().mean())
    return float(torch.stack(found).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_learned_codes_find_more_than_random_signs(kind, learned):
    keys, queries = heads(2, LENGTH, 3)  # not those of the text
    assert recall(made(OracleLayer, keys=keys), queries) == 1
    random = recall(made(SignsLayer, keys=keys), queries)
    assert recall(made(kind, learned[kind], keys), queries) > random + 0.05


@pytest.mark.parametrize("every", [1, 3])
def test_a_query_sees_no_later_key_and_none_of_the_repetition_is_drawn(text, every):
    """The place of a key is written into its first number, and that of a query into its own."""
    keys, queries = text.keys.clone(), text.queries.clone()
    keys[..., 0] = torch.arange(LENGTH)
    queries[..., 0] = text.places
    marked = LayerText(keys, text.values, queries, text.places, text.passage, text.scaling)
    drawn, first = set(), set()
    for seed in range(40):
        batch = hashing.draw(marked, 20, generator(seed), every)
        keys_at = batch.keys[0, :, 0]
        assert set(keys_at.diff().tolist()) == {every}
        first.add(int(keys_at[0]))
        for n, place in enumerate(batch.queries[0, 0, :, 0].tolist()):
            drawn.add(int(place))
            seen = keys_at <= place
            assert batch.seen[n] == seen.sum()
            exact = torch.einsum("hgd,hnd->hgn", batch.queries[:, :, n], batch.keys)
            torch.testing.assert_close(batch.products[:, :, n][..., seen], exact[..., seen], rtol=1e-4, atol=1e-2)
            assert bool((batch.products[:, :, n][..., ~seen] == -math.inf).all())
    assert first == set(range(every))
    usable = [place for place in text.places.tolist() if 223 <= place < LENGTH - REPEATED]  # a half of the 448
    assert drawn == set(usable)


def test_a_pair_is_one_of_the_best_and_another_that_the_query_sees(text, monkeypatch):
    monkeypatch.setattr(spotlight, "PAIRS", 400)
    batch = hashing.draw(text, 10, generator(0))
    better, other, counted = spotlight.pairs(batch, generator(1))
    assert better.shape == other.shape == counted.shape == (KV_HEADS, GROUP, 10, 400)
    for head in range(KV_HEADS):
        for n in range(10):
            seen = int(batch.seen[n])
            products = (batch.queries[head, 1, n] @ batch.keys[head, :seen].T).tolist()
            order = sorted(range(seen), key=lambda token: -products[token])
            best = set(order[: seen * 2 // 100])
            assert set(better[head, 1, n].tolist()) == best
            assert set(other[head, 1, n].tolist()) <= set(range(seen))
            assert len(set(other[head, 1, n].tolist())) > seen / 2
            for token, counts in zip(other[head, 1, n].tolist(), counted[head, 1, n].tolist(), strict=True):
                assert counts == (token not in best)


def test_the_ranking_loss_by_hand_and_its_gradient_through_signs(text, learned):
    batch = hashing.draw(text, 3, generator(0))
    weights = learned[SpotlightLayer]
    found = spotlight.pairs(batch, generator(1))
    losses = []
    layer = made(SpotlightLayer, weights, batch.keys.unsqueeze(0))
    for n in range(3):
        scores = hashing.HashLayer.score(layer, batch.queries[:, :, n].unsqueeze(0))[0] / 128**0.5
        for head, g, pair in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(64)).tolist():
            better, other, counted = (each[head, g, n, pair] for each in found)
            if counted:
                apart = float(scores[head, g, better] - scores[head, g, other])
                losses.append(math.log1p(math.exp(3 - apart)))
    assert float(spotlight.ranking_loss(weights, batch, *found)) == pytest.approx(sum(losses) / len(losses), rel=1e-4)

    x = torch.tensor([-3.0, 0.5, 2.0], requires_grad=True)
    spotlight.soft_signs(x).sum().backward()
    torch.testing.assert_close(spotlight.soft_signs(x).detach(), torch.tensor([-1.0, 1.0, 1.0]))
    torch.testing.assert_close(x.grad, torch.tensor([1 / 16, 1 / 2.25, 1 / 9]))


def test_labels_fall_from_20_to_1_and_the_loss_is_that_of_its_items(text, monkeypatch):
    batch = hashing.draw(text, 3, generator(0))
    label = hata.labels(batch)
    weight = torch.randn(KV_HEADS, HEAD_DIM, 128, generator=generator(1)) / 4
    items = sum(batch.seen.tolist())
    similarity = balance = 0.0
    for head in range(KV_HEADS):
        hashed_keys = [2 / (1 + torch.exp(-0.1 * (key @ weight[head]))) - 1 for key in batch.keys[head]]
        for g in range(GROUP):
            total = torch.zeros(128)
            for n, seen in enumerate(batch.seen.tolist()):
                query = batch.queries[head, g, n]
                products = (batch.keys[head, :seen] @ query).tolist()
                order = sorted(range(seen), key=lambda token, products=products: -products[token])
                top = seen // 10
                expected = [-1.0] * seen + [0.0] * (len(batch.keys[head]) - seen)
                for rank, token in enumerate(order[:top]):
                    expected[token] = 20 - 19 * rank / (top - 1)
                assert label[head, g, n].tolist() == pytest.approx(expected, abs=1e-4)
                hashed = 2 / (1 + torch.exp(-0.1 * (query @ weight[head]))) - 1
                for token in range(seen):
                    similarity += expected[token] * float((hashed - hashed_keys[token]).square().sum()) / items
                    total += (hashed + hashed_keys[token]) / items / 128
            balance += float(total.square().sum())
    apart = torch.stack([weight[head] @ weight[head].T - torch.eye(HEAD_DIM) for head in range(KV_HEADS)])
    terms = (similarity, balance, float(apart.square().sum().sqrt()))
    assert float(hata.hash_loss(weight, batch, label)) == pytest.approx(0.01 * terms[0] + terms[1] + terms[2], rel=1e-5)
    for alone in range(3):
        for place, name in enumerate(("EPSILON", "LAMBDA", "ETA")):
            monkeypatch.setattr(hata, name, float(place == alone))
        assert float(hata.hash_loss(weight, batch, label)) == pytest.approx(terms[alone], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind, text, learned, monkeypatch):
    monkeypatch.setattr({HataLayer: hata, SpotlightLayer: spotlight}[kind], "STEPS", 0)
    batch = hashing.draw(text, 50, generator(5))
    losses = []
    for weights in (kind.learn(text, 0), learned[kind]):
        if kind is HataLayer:
            losses.append(float(hata.hash_loss(weights["weight"], batch, hata.labels(batch))))
        else:
            losses.append(float(spotlight.ranking_loss(weights, batch, *spotlight.pairs(batch, generator(6)))))
    assert losses[1] < losses[0] / 2
