"""The baseline that benchmarks compare with computes what the paper says: it is no straw man, nor wrong."""

import pytest
import torch

from bpc_calib import hash_scores, quantize_query
from bpc_calib.backends.triton.paper import popcount_scores
from bpc_calib.bench.dense import folded, ours
from bpc_calib.bench.paper import paper_step
from bpc_calib.method.scoring import QuantizedQuery
from bpc_calib.method.sparse_attention import sparse_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there by the interpreter
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def random_codes(generator, *shape):
    words = torch.randint(-(1 << 31), 1 << 31, (2, *shape, 1), generator=generator)
    return (words[0] << 32) ^ words[1]


@pytest.mark.parametrize(
    ("heads", "tokens"),
    # 257 tokens have a block of one, too.
    [(1, 500), (4, 257), (5, 64), (8, 33), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_scores_are_those_of_the_oracle(heads, tokens):
    generator = torch.Generator().manual_seed(heads)
    values = torch.randint(-127, 128, (2, 3, heads, 64), generator=generator).to(torch.int8)
    values[0, 0] = 0
    values[0, 1] = 127
    values[0, 2] = -127
    values[1, 0, 0] = torch.where(values[1, 0, 0] < 0, -127, 127)
    codes = random_codes(generator, 2, 3, tokens)
    codes[:, :, 0], codes[:, :, tokens // 2] = -1, 0  # all agree, or none
    expected = hash_scores(QuantizedQuery(values, torch.ones(2, 3)), codes).amax(-2)
    assert torch.equal(popcount_scores(values.to(DEVICE), codes.to(DEVICE)).cpu(), expected)


def test_scores_of_a_part_of_a_longer_buffer():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (2, 2, 4, 64), generator=generator).to(torch.int8)
    codes = random_codes(generator, 2, 2, 300)[:, :, :190]
    expected = hash_scores(QuantizedQuery(values, torch.ones(2, 2)), codes).amax(-2)
    assert torch.equal(popcount_scores(values.to(DEVICE), codes.to(DEVICE)).cpu(), expected)


def test_other_lengths_of_codes_are_refused():
    with pytest.raises(ValueError, match="64 bits"):
        popcount_scores(torch.zeros(1, 1, 1, 32, dtype=torch.int8), torch.zeros(1, 1, 5, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("heads", "k", "attention"),
    [
        (1, 20, "split"),
        (4, 37, "sdpa"),
        # Each value above with the other one.
        pytest.param(1, 20, "sdpa", marks=pytest.mark.slow),
        pytest.param(4, 37, "split", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_attention_over_the_best_scores(heads, k, attention, monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", "triton")
    generator = torch.Generator().manual_seed(k)
    # Sums of small multiples of 1/8: exact in any order, so both round the same query.
    query = torch.randint(-4, 5, (2, 2, heads, 32), generator=generator).float()
    projection = torch.randint(-8, 9, (2, 64, 32), generator=generator).float() / 8
    keys, values = torch.randn(2, 2, 2, 400, 32, generator=generator).unbind()
    codes = random_codes(generator, 2, 2, 400)
    best = hash_scores(quantize_query(query, projection), codes).amax(-2).to(DEVICE).topk(k, sorted=False).indices
    given = [tensor.to(DEVICE) for tensor in (query, projection, codes, keys, values)]
    decode = folded if attention == "sdpa" else ours(given[0].device)
    expected = sparse_attention(given[0], given[3], given[4], best)
    torch.testing.assert_close(paper_step(decode, *given, k), expected)
