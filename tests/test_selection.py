"""The selected tokens: exactly k, chosen by the rules in order, with ties to the lower index."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpc_calib import InputError, attended, select
from bpc_calib.method.defaults import budget_text
from bpc_calib.method.selection import worst_first


def literal_select(scores, k, valid, recent, sink, error, safeguard):
    """Select for one row, in plain Python: apply the rules one after another until k tokens are chosen."""
    real = [i for i, v in enumerate(valid) if v]
    forced = real[::-1][:recent]
    forced += [i for i in real[:sink] if i not in forced]
    by_error = sorted((i for i in real if i not in forced and error[i] > -float("inf")), key=lambda i: (-error[i], i))
    forced += by_error[: int(k * round(safeguard * 100)) // 100]
    forced += sorted((i for i in real if i not in forced), key=lambda i: (-scores[i], i))
    return sorted(forced[:k])


def listed(error):
    """Return the candidates of the safeguard, with -1 for tokens with an error of -inf."""
    worst = worst_first(error)
    return worst.masked_fill(error.gather(-1, worst.long()) == -float("inf"), -1)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(0, 40), recent=st.integers(0, 5), sink=st.integers(0, 5))
def test_select_equals_the_rules_one_by_one(data, count, recent, sink):
    row = st.lists(st.integers(-3, 3), min_size=count, max_size=count)  # few values, so many ties
    scores, errors = data.draw(row), data.draw(row)
    error = [-float("inf") if e == -3 else float(e) for e in errors]
    valid = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    k = data.draw(st.integers(0, sum(valid)))
    safeguard = data.draw(st.sampled_from([0.0, 0.1, 0.29, 0.5, 1.0]))
    found = select(
        torch.tensor(scores, dtype=torch.int32),
        k,
        valid=torch.tensor(valid, dtype=torch.bool),
        recent=recent,
        sink=sink,
        worst=listed(torch.tensor(error)),
        safeguard=safeguard,
    )
    assert found.dtype == torch.int64
    assert found.tolist() == literal_select(scores, k, valid, recent, sink, error, safeguard)
    assert len(set(found.tolist())) == k


def test_rows_of_different_length_end_in_minus_one():
    scores = torch.tensor([[1, 9, 3, 7], [5, 5, 5, 5]], dtype=torch.int32)
    valid = torch.tensor([[True] * 4, [False, False, True, True]])
    assert select(scores, torch.tensor([3, 1]), valid=valid).tolist() == [[1, 2, 3], [2, -1, -1]]
    assert select(scores, torch.tensor([0, 2]), valid=valid).tolist() == [[-1, -1], [2, 3]]


def test_batch_equals_single():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-20, 20, (2, 3, 60), generator=generator, dtype=torch.int32)
    error = torch.rand(2, 3, 60, generator=generator)
    rules = {"recent": 2, "sink": 1, "safeguard": 0.2}
    found = select(scores, 15, worst=worst_first(error), **rules)
    assert found.shape == (2, 3, 15)
    for b in range(2):
        for h in range(3):
            assert torch.equal(found[b, h], select(scores[b, h], 15, worst=worst_first(error[b, h]), **rules))


def test_forced_tokens_do_not_exceed_k():
    scores = torch.arange(10, dtype=torch.int32)
    assert select(scores, 3, recent=5, sink=5).tolist() == [7, 8, 9]
    assert select(scores, 3, recent=1, sink=5).tolist() == [0, 1, 9]
    assert select(scores, 10).tolist() == list(range(10))
    assert select(scores, 0).tolist() == []


@pytest.mark.parametrize("extreme", [-(2**31), 2**31 - 1])
def test_scores_at_the_ends_of_int32_do_not_outweigh_a_rule(extreme):
    scores = torch.full((6,), extreme, dtype=torch.int32)
    scores[3] = 0
    best = 3 if extreme < 0 else 1
    assert select(scores, 3, recent=1, sink=1).tolist() == sorted({5, 0, best})


def test_the_number_of_attended_tokens():
    assert attended(1000, 0.02, 1) == 20
    assert attended(1000, 0.02) == 192
    assert attended(100, 0.02) == 100
    assert attended(100, 0.29, 1) == 29  # 0.29 * 100 is 28.999999999999996
    assert attended(100, 1.0, 1) == 100
    assert attended(100, 1, 1) == 1
    assert attended(100, 2048, 1) == 100
    assert attended(100_000, 2048) == 2048
    assert attended(0, 0.02) == 0
    assert attended(100_000, np.int64(2048)) == 2048
    assert attended(100_000, np.float64(0.02)) == 2000


@pytest.mark.parametrize("budget", [0, -1, 1.5, 0.0, float("nan"), True, "2%", None, torch.tensor(0.02)])
def test_refuses_budgets_out_of_range(budget):
    with pytest.raises(InputError, match="budget must be a share in"):
        attended(100, budget)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 5}, "k must be between 0 and the number of valid tokens"),
        ({"k": -1}, "k must be between 0"),
        ({"k": 4, "valid": torch.tensor([True, False, True, True])}, "k must be between 0"),
        ({"k": 1, "recent": -1}, "recent and sink must be 0 or more"),
        ({"k": 1, "safeguard": 1.5}, "safeguard in"),
    ],
)
def test_refuses_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        select(torch.arange(4), **arguments)


def test_refuses_float_scores():
    with pytest.raises(InputError, match="scores must be integers"):
        select(torch.ones(4), 1)


def test_the_widest_scores_keep_their_order():
    scores = torch.tensor([-(2**31) + 1, 2**31 - 1, 0, 2**31 - 2, -1])
    assert select(scores, 3).tolist() == [1, 2, 3]
    assert select(
        scores, 2, recent=1, worst=worst_first(torch.tensor([1e-30, 0.0, 0.0, 0.0, 9.0])), safeguard=0.5
    ).tolist() == [
        0,
        4,
    ]
    with pytest.raises(InputError, match="int32"):
        select(scores * 2, 3)


def test_budgets_in_words():
    assert [budget_text(each) for each in (0.02, 0.0025, 1, 8, 1024)] == [
        "2 %", "0.25 %", "1 token", "8 tokens", "1,024 tokens",
    ]  # fmt: skip
