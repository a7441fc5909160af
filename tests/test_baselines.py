"""Each method, compared with its paper's definition on cases small enough to compute by hand."""

import itertools
import math

import literal
import pytest
import tiny
import torch

from bpc_calib import describe
from bpc_calib.evaluation.baselines.bounds import OracleLayer, RandomLayer
from bpc_calib.evaluation.baselines.magicpig import MagicPIGLayer, MagicPIGSamplingLayer
from bpc_calib.evaluation.baselines.pyramidkv import PyramidKVLayer
from bpc_calib.evaluation.baselines.quest import QuestLayer
from bpc_calib.evaluation.baselines.signs import SignsLayer
from bpc_calib.evaluation.baselines.snapkv import SnapKVLayer
from bpc_calib.evaluation.baselines.twilight import TwilightLayer, TwilightOwnLayer
from bpc_calib.evaluation.baselines.window import WindowLayer
from bpc_calib.method.encoded import GAIN_UNIT
from bpc_calib.method.rules import Rules
from bpc_calib.method.scoring import GROUPS, hash_scores, quantize_query
from bpc_calib.method.state import Rows
from bpc_calib.runtime.layers import Common

MODEL = describe(tiny.config())
KEYS = torch.randn(1, 2, 70, 8, generator=torch.Generator().manual_seed(0))
VALUES = torch.randn(1, 2, 70, 8, generator=torch.Generator().manual_seed(1))
QUERY = torch.randn(1, 2, 2, 8, generator=torch.Generator().manual_seed(2))  # two query heads per KV head


def layer(kind, budget=12, index=0, keys=KEYS, values=VALUES, model=MODEL, layers=(0,), group="max"):
    rules = Rules(budget, min_tokens=1, recent=1, group=group)
    made = kind(index, rules, Common(model, layers=tuple(layers)), None)
    made.update(keys, values)
    return made


def chosen(made, visible=None, k=12):
    return made.choose(QUERY, rows(made, k, visible))


def rows(made, k, visible=None):
    length = made.get_seq_length()
    return Rows(torch.tensor([length]), torch.tensor([[k]]), length, k, visible)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("padding", [0, 25])
def test_the_oracle_chooses_the_largest_products_and_the_newest(group, padding):
    visible = torch.arange(70).unsqueeze(0) >= padding if padding else None
    found = chosen(layer(OracleLayer, group=group), visible)
    for head in range(2):
        products = (QUERY[0, head] @ KEYS[0, head, padding:].T).tolist()
        best = literal.group_scores(products, group, 8**0.5)
        order = sorted(range(69 - padding), key=lambda i: -best[i])
        assert found[0, head].tolist() == sorted([69, *(padding + i for i in order[:11])])


def test_the_window_is_four_sinks_and_the_newest():
    assert chosen(layer(WindowLayer))[0, 0].tolist() == [0, 1, 2, 3, *range(62, 70)]
    visible = torch.arange(70).unsqueeze(0) >= 10  # padding on the left
    assert chosen(layer(WindowLayer), visible)[0, 1].tolist() == [10, 11, 12, 13, *range(62, 70)]


def test_random_keys_differ_between_steps_and_repeat_between_runs():
    one, other = layer(RandomLayer), layer(RandomLayer)
    first, second = chosen(one), chosen(one)
    assert not torch.equal(first, second)
    assert torch.equal(first, chosen(other))
    counts = torch.bincount(torch.cat([chosen(one).flatten() for _ in range(500)]), minlength=70)[:69].float()
    # 1,000 draws of 11 out of 69 tokens: an expected count of 159 per token, standard deviation 12.
    assert (counts - 1000 * 11 / 69).abs().max() < 60


@pytest.mark.parametrize("group", GROUPS)
def test_quest_chooses_whole_pages_by_their_upper_bound(group):
    found = chosen(layer(QuestLayer, budget=33, group=group), k=33)
    for head in range(2):
        bounds = []
        for page in KEYS[0, head].split(16):
            per_query = [
                sum(max(float(q[d] * page[:, d].min()), float(q[d] * page[:, d].max())) for d in range(8))
                for q in QUERY[0, head]
            ]
            assert all(per_query[g] >= float((page @ QUERY[0, head, g]).max()) - 1e-5 for g in range(2))
            bounds.append(per_query)
        bounds = literal.group_scores(list(zip(*bounds, strict=True)), group, 8**0.5)
        taken = [69]  # the newest
        for page in sorted(range(5), key=lambda page: -bounds[page]):
            taken += [token for token in range(16 * page, min(70, 16 * page + 16)) if token != 69]
        assert found[0, head].tolist() == sorted(taken[:33])


def test_quest_ignores_padding_in_its_pages():
    keys = KEYS.clone()
    keys[:, :, :20] = 100.0
    visible = torch.arange(70).unsqueeze(0) >= 20
    with_padding = chosen(layer(QuestLayer, keys=keys), visible)
    keys[:, :, :20] = -100.0
    assert torch.equal(with_padding, chosen(layer(QuestLayer, keys=keys), visible))
    assert (with_padding >= 20).all()


@pytest.mark.parametrize("group", GROUPS)
def test_random_signs_rank_by_projected_products(group):
    directions = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    found = chosen(layer(SignsLayer, group=group))
    for head in range(2):
        signs = torch.where(KEYS[0, head] @ directions.T >= 0, 1.0, -1.0)
        scores = torch.tensor(literal.group_scores((QUERY[0, head] @ directions.T @ signs.T).tolist(), group))
        order = scores[:69].argsort(descending=True)[:11].tolist()
        assert found[0, head].tolist() == sorted([69, *order])


def test_a_collision_is_a_table_with_ten_equal_signs():
    made = layer(MagicPIGLayer)
    found = made.collisions(QUERY, None)
    directions = torch.randn(1500, 8, generator=torch.Generator().manual_seed(0))
    centred = KEYS - KEYS.mean(2, keepdim=True)
    for head, g, token in itertools.product(range(2), range(2), range(0, 70, 7)):
        same = (centred[0, head, token] @ directions.T >= 0) == (QUERY[0, head, g] @ directions.T >= 0)
        assert found[0, head, g, token] == int(same.view(150, 10).all(-1).sum())
    assert torch.equal(made.rank(QUERY, None), found.amax(2))


def test_the_sampling_probability_is_that_of_two_or_more_collisions():
    made = layer(MagicPIGSamplingLayer)
    key = torch.tensor([[[[1.0, 0, 0, 0, 0, 0, 0, 0]]]])
    for angle in (0.3, 1.0, 1.6):
        query = torch.tensor([[[[math.cos(angle), math.sin(angle), 0, 0, 0, 0, 0, 0]]]])
        p = (1 - angle / math.pi) ** 10
        none, one = (1 - p) ** 150, 150 * p * (1 - p) ** 149
        assert float(made.chance(query, key)) == pytest.approx(1 - none - one, rel=1e-3)


def test_sampling_estimates_full_attention():
    """Over many random tables, the mean of the paper's weighted estimate approaches full attention."""
    generator = torch.Generator().manual_seed(5)
    keys, values = (torch.randn(1, 1, 300, 8, generator=generator) for _ in range(2))
    query = torch.randn(1, 1, 1, 8, generator=generator)
    full = torch.nn.functional.scaled_dot_product_attention(query, keys, values)[0, 0, 0]
    # A probability near 0 would give an unbounded weight.
    found = []
    for seed in range(40):
        made = MagicPIGSamplingLayer(0, Rules(12), Common(MODEL, seed=seed), None)
        made.update(keys, values)
        found.append(made.decode(query, rows(made, 12))[0][0, 0, 0])
    estimate = torch.stack(found)
    assert 0.2 < made.attended / 300 < 0.9  # part of the keys was sampled
    error = estimate.std(0) / 40**0.5
    assert ((estimate.mean(0) - full).abs() < 4 * error + 0.02).all()


def snapkv_by_hand(keys, queries, window):
    """Return the importance of the tokens before the window for one KV head, computed in plain loops."""
    count = len(keys)
    total = [0.0] * (count - window)
    for query in queries:
        for place, q in enumerate(query[-window:]):
            seen = count - window + place + 1
            weights = [math.exp(float(q @ keys[i]) * 8**-0.5) for i in range(seen)]
            for i in range(count - window):
                total[i] += weights[i] / sum(weights) / window / len(queries)
    padded = [0.0, 0.0, *total, 0.0, 0.0]
    return [sum(padded[i : i + 5]) / 5 for i in range(len(total))]


def test_snapkv_keeps_what_the_window_attended_to():
    queries = torch.randn(1, 4, 70, 8, generator=torch.Generator().manual_seed(3))
    made = layer(SnapKVLayer)
    made.observe(queries, None, torch.arange(70))
    found = chosen(made)
    for head in range(2):
        importance = snapkv_by_hand(KEYS[0, head], queries[0, 2 * head : 2 * head + 2], 6)
        order = sorted(range(64), key=lambda i: -importance[i])[:6]
        assert found[0, head].tolist() == sorted([*order, *range(64, 70)])
    # Later tokens are kept in addition to those of the prompt; other queries change nothing.
    for token in range(3):
        made.update(KEYS[:, :, token : token + 1], VALUES[:, :, token : token + 1])
    assert made.count(73) == 15
    later = made.choose(-QUERY, rows(made, 15))
    assert torch.equal(later, torch.cat([found, torch.arange(70, 73).expand(1, 2, 3)], dim=-1))


def test_pyramidkv_gives_lower_layers_more_and_keeps_the_total():
    model = describe(tiny.config(num_hidden_layers=5))
    made = [layer(PyramidKVLayer, 40, index, model=model, layers=range(5)) for index in range(5)]
    counts = [one.kept(70) for one in made]
    # The window is 20; of the other 20 (the mean), the last layer keeps a twentieth.
    assert counts == [59, 50, 40, 30, 21]
    assert sum(counts) == 5 * 40
    assert [one.window(70) for one in made] == [20] * 5
    assert made[0].kept(30) == 30
    # With dense layers, only the choosing layers share the total.
    choosing = [layer(PyramidKVLayer, 40, index, model=model, layers=(2, 4)) for index in (2, 4)]
    assert [one.kept(70) for one in choosing] == [59, 21]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (OracleLayer, 70 * 2 * 8 * 4),
        (QuestLayer, 5 * 2 * 2 * 8 * 4),
        (SignsLayer, 70 * 2 * 8),
        (MagicPIGLayer, 70 * 2 * 188),
        (WindowLayer, 0),
    ],
)
def test_bytes_of_a_ranking(kind, expected):
    token = 2 * 2 * 8 * 4
    assert layer(kind).step_bytes(70, token) == 12 * token + expected


def twilight(kind, keys):
    """A layer with codes of these keys."""
    made = kind(0, Rules(12, min_tokens=1, recent=1, group="max", safeguard=0.0), Common(MODEL, layers=(0,)), None)
    made.update(keys, torch.zeros_like(keys))
    made.skip_attention()
    made.hash(None)
    return made


@pytest.mark.parametrize("kind", [TwilightLayer, TwilightOwnLayer])
def test_twilight_attends_to_the_fewest_tokens_that_reach_a_weight(kind):
    """As its codes estimate weights, computed from their scores in plain loops."""
    made = twilight(kind, 3 * KEYS)
    given = rows(made, 12)
    _, found = made.decode(QUERY, given)
    asked = quantize_query(QUERY, made.codebook.projection)
    scores = hash_scores(asked, made.state().codes[:, :, :70], made.state().gain[:, :, :70])
    weights = []
    for head in range(2):
        logits = scores[0, head].double() * float(asked.scale[0, head]) * 8**-0.5 / GAIN_UNIT
        weights.append(sorted(logits.softmax(-1).mean(0).tolist(), reverse=True))

    def fewest(share):
        return [next((n for n in range(1, 71) if sum(each[:n]) >= share), 70) for each in weights]

    counts = (found >= 0).sum(-1)[0].tolist()
    if kind is TwilightOwnLayer:
        assert counts == fewest(0.95)
        assert made.step_bytes(70, 100) == round(sum(counts) / 2 * 100) + made.ranking_bytes(70)
    else:
        assert sum(counts) in (23, 24)  # all together as many as BPC's 12 each; two heads may reach a weight at once
        share = min(sum(each[:n]) for each, n in zip(weights, counts, strict=True))
        assert counts == fewest(share)
    assert counts[0] != counts[1]
