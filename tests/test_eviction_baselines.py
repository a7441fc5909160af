"""Methods that share tokens between layers, compared with their papers' definitions written out in plain loops."""

import math

import pytest
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_baselines import QUERY, rows

from bpc_calib import BPCCache, describe, enable
from bpc_calib.evaluation import learning
from bpc_calib.evaluation.baselines.apportion import apportion
from bpc_calib.evaluation.baselines.cake import CakeLayer
from bpc_calib.evaluation.baselines.compresskv import CompressKVLayer, lost, retrieved
from bpc_calib.evaluation.baselines.snapkv import SnapKVLayer
from bpc_calib.evaluation.fidelity import probe
from bpc_calib.evaluation.forcing import force, fork, prefill
from bpc_calib.evaluation.learning import REPEATED, LayerText
from bpc_calib.method.rules import Rules
from bpc_calib.runtime.layers import Common

LAYERS, BATCH, PROMPT, DIM = 3, 2, 70, 8


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def observed(kind, budget, *, batch=slice(None), kv_heads=2, layers=range(LAYERS), sharpness=(1.0, 1.0, 1.0)):
    """Return layers of one cache that have seen a prompt of each sequence, and the keys and queries of each."""
    common = Common(describe(tiny.config()), layers=tuple(layers))
    made, seen = [], []
    for index in layers:
        keys, values = (draw(BATCH, kv_heads, PROMPT, DIM, seed=seed + index)[batch] for seed in (0, 10))
        queries = draw(BATCH, 4, PROMPT, DIM, seed=20 + index)[batch] * sharpness[index]
        one = kind(index, Rules(budget, min_tokens=1, recent=1), common, None)
        one.update(keys, values)
        one.observe(queries, None, torch.arange(PROMPT))
        made.append(one)
        seen.append((keys, queries))
    return made, seen


def taught(heads, errors, kind=CompressKVLayer):
    learned = {i: {"heads": torch.tensor(heads), "error": torch.tensor([error])} for i, error in enumerate(errors)}
    return type(kind.__name__, (kind,), {"learned": learned})


def chosen(made, k=1):
    """Return the tokens of each sequence and KV head; a wrong `k` must not matter to CAKE."""
    query = QUERY[:, :1].expand(len(made.keys), made.keys.shape[1], -1, -1)
    return [[[i for i in head if i >= 0] for head in row] for row in made.choose(query, rows(made, k)).tolist()]


def attended(keys, query, place):
    """Return the weights of attention to the tokens up to a place, and zeros for the others, as a list."""
    weights = [math.exp(float(query @ keys[i]) * DIM**-0.5) for i in range(place + 1)]
    return [weight / sum(weights) for weight in weights] + [0.0] * (len(keys) - place - 1)


def smoothed(values):
    padded = [0.0, 0.0, *values, 0.0, 0.0]
    return [sum(padded[i : i + 5]) / 5 for i in range(len(values))]


def best(importance, count):
    return sorted(sorted(range(len(importance)), key=lambda i: -importance[i])[:count])


@st.composite
def shares(draw):
    weights = draw(st.lists(st.floats(0, 1e6) | st.integers(0, 3).map(float), min_size=1, max_size=12))
    least = draw(st.integers(0, 40))
    most = draw(st.integers(least, 200))
    return draw(st.integers(least * len(weights), most * len(weights))), weights, least, most


@given(shares())
@example((2, [0.0, 4.0, 5e-324], 0, 1))  # two shares that round to 0
@settings(max_examples=300, deadline=None)
def test_shares_add_up_within_their_bounds_and_a_larger_weight_gets_no_less(case):
    total, weights, least, most = case
    found = apportion(total, weights, least, most)
    assert sum(found) == total
    assert all(least <= each <= most for each in found)
    by_weight = [each for _, each in sorted(zip(weights, found, strict=True))]
    assert by_weight == sorted(found)


def test_shares_are_in_proportion_and_what_is_cut_off_goes_to_the_others():
    assert apportion(24, [1, 2, 3], 2, 20) == [5, 8, 11]
    assert apportion(10, [1, 1, 1], 0, 10) == [4, 3, 3]
    assert apportion(11, [1.0, 1.5, 2.5], 0, 11) == [2, 3, 6]  # 2.2, 3.3 and 5.5
    assert apportion(60, [1, 2, 97], 0, 40) == [10, 10, 40]  # 0.6 and 1.2 by proportion, and 19 of what is cut off
    assert apportion(60, [0, 0, 0], 0, 40) == [20, 20, 20]
    assert apportion(60, [0, 0, 5], 5, 20) == [20, 20, 20]


def cake_by_hand(keys, queries, window):
    """Return the importance by KV head of the tokens before the window, and the preference of the layer."""
    before, spread, change, importance = PROMPT - window, 0.0, 0.0, []
    for head, own in enumerate(keys):
        total = [0.0] * before
        for query in queries[2 * head : 2 * head + 2]:
            weights = [attended(own, query[place], place)[:before] for place in range(before, PROMPT)]
            spread -= sum(w * math.log(w + 1e-10) for row in weights for w in row)
            indicator = []
            for column in zip(*weights, strict=True):
                mean = sum(column) / window
                variance = sum((w - mean) ** 2 for w in column) / (window - 1)
                change += variance
                indicator.append(mean + 200 * variance)
            total = [a + b / 2 for a, b in zip(total, smoothed(indicator), strict=True)]
        importance.append(total)
    return importance, spread * change


@pytest.mark.parametrize(("budget", "window"), [(12, 6), (30, 8), (3, 2)])
def test_cake_keeps_what_attention_comes_back_to_and_shares_by_preference(budget, window):
    made, seen = observed(CakeLayer, budget, sharpness=(0.5, 1.0, 2.0))
    found = [chosen(one) for one in made]
    counts = []
    for row in range(BATCH):
        by_hand = [cake_by_hand(keys[row], queries[row], window) for keys, queries in seen]
        preferences = [preference for _, preference in by_hand]
        assert [float(made[0].common.told[i][row]) for i in range(LAYERS)] == pytest.approx(preferences, rel=1e-4)
        counts.append(apportion(LAYERS * budget, preferences, window, PROMPT))
        for index, (importance, _) in enumerate(by_hand):
            for head in range(2):
                kept = [*best(importance[head], counts[row][index] - window), *range(PROMPT - window, PROMPT)]
                assert found[index][row][head] == kept
    assert [one.count(PROMPT) for one in made] == [sum(each) // BATCH for each in zip(*counts, strict=True)]
    assert budget < 12 or len({len(layer[0][0]) for layer in found}) > 1  # layers do differ


def test_cake_gives_no_layer_more_than_the_prompt_and_the_total_to_all():
    made, _ = observed(CakeLayer, 40, sharpness=(0.1, 0.1, 8.0))
    counts = [[len(one[row][0]) for one in map(chosen, made)] for row in range(BATCH)]
    assert [sum(row) for row in counts] == [LAYERS * 40] * BATCH
    assert [max(row) for row in counts] == [PROMPT] * BATCH
    everything, _ = observed(CakeLayer, PROMPT)
    assert [one.count(PROMPT) for one in everything] == [PROMPT] * LAYERS
    short = CakeLayer(0, Rules(2, min_tokens=1), Common(describe(tiny.config()), layers=(0,)), None)
    short.update(draw(1, 2, 2, DIM, seed=0), draw(1, 2, 2, DIM, seed=1))
    short.observe(draw(1, 4, 2, DIM, seed=2), None, torch.arange(2))
    assert short.count(2) == 2
    one_token, _ = observed(CakeLayer, 1)
    assert [chosen(one)[0][0] for one in one_token] == [[PROMPT - 1]] * LAYERS


def test_cake_gives_each_sequence_of_a_batch_what_it_gets_alone():
    together, _ = observed(CakeLayer, 20, sharpness=(0.5, 1.0, 2.0))
    for row in range(BATCH):
        alone, _ = observed(CakeLayer, 20, batch=slice(row, row + 1), sharpness=(0.5, 1.0, 2.0))
        assert [chosen(one)[0] for one in alone] == [chosen(one)[row] for one in together]


@pytest.mark.parametrize("kind", [CakeLayer, taught([0.1, 0.4, 0.3, 0.2], [1.0, 2.0, 5.0])])
def test_later_tokens_are_kept_in_addition(kind):
    made, _ = observed(kind, 12)
    before = [(one.count(PROMPT), chosen(one, one.count(PROMPT))) for one in made]
    for one, (count, kept) in zip(made, before, strict=True):
        for token in range(3):
            one.update(one.keys[:, :, token : token + 1], one.values[:, :, token : token + 1])
        one.observe(draw(BATCH, 4, 3, DIM, seed=9), None, torch.arange(PROMPT, PROMPT + 3))  # changes nothing
        assert one.count(PROMPT + 3) == count + 3
        later = [[[*head, PROMPT, PROMPT + 1, PROMPT + 2] for head in row] for row in kept]
        assert chosen(one, count + 3) == later


def test_compresskv_keeps_the_same_tokens_for_all_kv_heads_by_its_best_heads(monkeypatch):
    monkeypatch.setattr("bpc_calib.evaluation.baselines.compresskv.HEADS", 2)
    made, ((keys, queries),) = observed(taught([0.1, 0.4, 0.3, 0.2], [1.0]), 12, layers=(0,))
    found = chosen(made[0], 12)
    for row in range(BATCH):
        total = [0.0] * (PROMPT - 6)
        for head in (1, 2):  # of which one is in each group
            for place in range(PROMPT - 6, PROMPT):
                weights = attended(keys[row, head // 2], queries[row, head, place], place)
                total = [a + b for a, b in zip(total, weights, strict=False)]
        assert found[row] == [[*best(smoothed(total), 6), *range(PROMPT - 6, PROMPT)]] * 2


def test_compresskv_with_all_heads_of_one_kv_head_and_equal_errors_is_snapkv():
    snapkv = type("SnapKVWithCompressKVsWindow", (SnapKVLayer,), {"WINDOW": 8})
    for budget in (12, 40):
        one, _ = observed(taught([0.1, 0.4, 0.3, 0.2], [0.3] * 3), budget, kv_heads=1)
        other, _ = observed(snapkv, budget, kv_heads=1)
        assert [each.count(PROMPT) for each in one] == [budget] * LAYERS
        assert [chosen(each, budget) for each in one] == [chosen(each, budget) for each in other]


def test_compresskv_shares_by_the_errors_with_a_minimum_and_three_times_the_mean():
    def counts(errors, budget, length):
        common = Common(describe(tiny.config()), layers=(0, 1, 2, 3))
        kind = taught([0.0], errors)
        return [kind(i, Rules(budget, min_tokens=1), common, None).kept(length) for i in range(4)]

    assert counts([1.0, 1.0, 2.0, 4.0], 100, 1000) == [66, 66, 100, 168]  # 32 each, and 272 in proportion
    assert counts([0.0, 0.0, 0.0, 1.0], 100, 1000) == [34, 33, 33, 300]  # of 304, 4 go to the others
    assert counts([0.0, 0.0, 0.0, 1.0], 100, 200) == [67, 67, 66, 200]
    assert counts([0.0, 0.0, 0.0, 1.0], 20, 200) == [20] * 4
    assert counts([0.0, 0.0, 0.0, 1.0], 200, 200) == [200] * 4


def text(length=200, passage=50):
    """Return a text of which the queries of the repetition are kept, and every third before it."""
    places = torch.cat([torch.arange(0, length - REPEATED, 3), torch.arange(length - REPEATED, length)])
    keys, values = (draw(2, 2, length, DIM, seed=seed) for seed in (1, 2))
    return LayerText(keys, values, 2 * draw(2, 4, len(places), DIM, seed=3), places, passage, DIM**-0.5)


def one_of(made, index):
    parts = (part[index : index + 1] for part in (made.keys, made.values, made.queries))
    return LayerText(*parts, made.places, made.passage, made.scaling)


def test_a_head_scores_its_attention_to_the_whole_passage_while_it_is_repeated():
    made = text()
    expected = []
    for row in range(2):
        for head in range(4):
            total = 0.0
            for query, place in zip(made.queries[row, head, -REPEATED:], range(200 - REPEATED, 200), strict=True):
                total += sum(attended(made.keys[row, head // 2], query, place)[50 : 50 + REPEATED])
            expected.append(total / REPEATED)
        assert retrieved(one_of(made, row)).tolist() == pytest.approx(expected[-4:], rel=1e-4)
    found = CompressKVLayer.learn(made, 0)["heads"]
    assert found.tolist() == pytest.approx([(a + b) / 2 for a, b in zip(expected[:4], expected[4:], strict=True)])


def test_the_error_is_that_of_attention_without_what_is_evicted():
    made, heads, prompt = text(), torch.tensor([0, 3]), 200 - REPEATED
    errors = []
    for row in range(2):
        total = [0.0] * (prompt - 8)
        asked = len(made.places) - REPEATED
        for head in (0, 3):
            for n in range(asked - 8, asked):
                weights = attended(made.keys[row, head // 2, :prompt], made.queries[row, head, n], int(made.places[n]))
                total = [a + b for a, b in zip(total, weights, strict=False)]
        kept = [*best(smoothed(total), 8), *range(prompt - 8, prompt)]  # 2 % of 136 tokens are fewer than 16
        error = 0.0
        for n, place in enumerate(range(prompt, 200), start=asked):
            squared, norm = 0.0, 0.0
            for head in range(4):
                keys, values = made.keys[row, head // 2], made.values[row, head // 2].double()
                weights = torch.tensor(attended(keys, made.queries[row, head, n], place), dtype=torch.float64)
                left = [*kept, *range(prompt, 200)]
                full, sparse = weights @ values, weights[left] @ values[left] / weights[left].sum()
                squared, norm = squared + float((sparse - full) @ (sparse - full)), norm + float(full @ full)
            error += squared**0.5 / (norm**0.5 + 1e-5) / REPEATED
        assert float(lost(one_of(made, row), heads)) == pytest.approx(error, rel=1e-4)
        errors.append(float(lost(one_of(made, row), torch.arange(4))))
    found = CompressKVLayer.learn(made, 0)["error"]
    assert found.tolist() == pytest.approx([sum(errors) / 2])  # with four of four heads


@pytest.mark.parametrize("kind", [CakeLayer, CompressKVLayer])
def test_a_model_decodes_a_batch_as_its_prompts_alone_and_a_probe_asks_the_same_layers(kind):
    model = tiny.model()
    enable(model)
    ids = torch.randint(250, (2, 128), generator=torch.Generator().manual_seed(0))
    if kind is CompressKVLayer:
        learned, _ = learning.learn(model, ids, {"compresskv": kind.learn}, range(LAYERS), {})
        kind = type("Learned", (kind,), {"learned": learned["compresskv"]})
        assert [each["heads"].shape for each in kind.learned.values()] == [(4,)] * LAYERS
        assert all(0 < float(each["error"]) < 2 for each in kind.learned.values())

    def cache():
        made = type("Compared", (BPCCache,), {"layer_class": kind})
        return made(model.config, budget=40, min_tokens=1, dense_layers=(), min_context=0)

    def decoded(prompts):
        held = fork(prefill(model, prompts[:, :100]), cache())
        return force(model, held, prompts[:, 100:110]), held

    together, held = decoded(ids)
    for row in range(2):
        torch.testing.assert_close(decoded(ids[row : row + 1])[0], together[row : row + 1], rtol=1e-4, atol=1e-4)
    assert sum(layer.kept(100) for layer in held.layers) in range(LAYERS * 40 - 2, LAYERS * 40 + 1)
    full = model(ids[:, :110]).logits[:, -1]
    assert (together - full).abs().max() > 0.01  # something was evicted

    probed = cache()
    measuring = fork(prefill(model, ids[:, :100]), probe(model.config, {"it": probed}))
    force(model, measuring, ids[:, 100:103])
    assert [layer.kept(100) for layer in probed.layers] == [layer.kept(100) for layer in held.layers]
    assert measuring.found()["it"].shape == (LAYERS, 2, 2, 4)
