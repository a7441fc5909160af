"""Algorithm 3: exact integers, equal for every formula of the score."""

import math

import literal
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decomposition import random_keys

from bpc_calib import InputError, QuantizedQuery, encode, hash_scores, quantize_query
from bpc_calib.method.codes import pack_codes
from bpc_calib.method.nibbles import named, pack_nibbles, unpack_nibbles
from bpc_calib.method.scoring import GROUPS, LARGEST_SCORE, _sums_of_signs, group_scores

bit_lists = [32, 64, 128]


def quantized(values: torch.Tensor) -> QuantizedQuery:
    """Of the rows of signs, `[..., G, H]`."""
    return QuantizedQuery(_sums_of_signs(values).to(torch.int16), torch.ones(values.shape[:-2]))


def rounded(query: QuantizedQuery) -> torch.Tensor:
    """The rounded products with rows of signs, `[..., G, H]`: what the entries of a nibble differ by."""
    one_bit = query.tables[..., [1, 2, 4, 8]] - query.tables[..., :1]
    return one_bit.div(2, rounding_mode="trunc").flatten(-2)


def score_all_ways(values: torch.Tensor, positive: torch.Tensor, gain: torch.Tensor) -> None:
    """Assert that every formula of the score returns the same integers, for values [G, H], bits [N, H], gain [N]."""
    found = hash_scores(quantized(values), pack_codes(positive))
    with_gain = hash_scores(quantized(values), pack_codes(positive), gain)
    assert found.dtype == with_gain.dtype == torch.int32
    dot = values.long() @ (2 * positive.long() - 1).T
    assert torch.equal(found.long(), dot)
    assert torch.equal(with_gain.long(), dot * (gain.long() + 32))
    for g, query in enumerate(values.tolist()):
        total = sum(abs(q) for q in query)
        signs = [int(q >= 0) for q in query]
        for n, code in enumerate(positive.int().tolist()):
            assert found[g, n] == literal.bit_plane_score(query, code)
            agree = sum(abs(q) for q, s, h in zip(query, signs, code, strict=True) if s == h)
            assert found[g, n] == 2 * agree - total  # half the popcounts
            assert (found[g, n] + total) % 2 == 0


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from(bit_lists),
    group=st.integers(1, 5),
    count=st.integers(0, 12),
    seed=st.integers(0, 10_000),
)
def test_every_formula_returns_the_same_integers(bits, group, count, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (group, bits), generator=generator)
    positive = torch.rand(count, bits, generator=generator) < 0.5
    score_all_ways(values, positive, torch.randint(0, 256, (count,), generator=generator).byte())


@pytest.mark.parametrize("bits", bit_lists)
def test_extreme_values(bits):
    values = torch.stack([torch.full((bits,), v) for v in (127, -127, 0, 1)])
    positive = torch.stack([torch.full((bits,), v) for v in (True, False)])
    score_all_ways(values, positive, torch.tensor([255, 0], dtype=torch.uint8))
    largest = hash_scores(quantized(values), pack_codes(positive), torch.tensor([255, 255], dtype=torch.uint8))
    assert largest.abs().max() == 127 * bits * 287 < 2**23


def test_leading_dimensions_broadcast():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (3, 2, 4, 64), generator=generator)
    positive = torch.rand(2, 10, 64, generator=generator) < 0.5
    scores = hash_scores(quantized(values), pack_codes(positive))
    assert scores.shape == (3, 2, 4, 10)
    for batch in range(3):
        for head in range(2):
            alone = hash_scores(quantized(values[batch, head]), pack_codes(positive[head]))
            assert torch.equal(scores[batch, head], alone)


@settings(max_examples=50, deadline=None)
@given(group=st.integers(1, 8), dim=st.integers(1, 64), seed=st.integers(0, 10_000))
def test_query_is_rounded_with_one_scale_per_group(group, dim, seed):
    query = random_keys(2, 3, group, dim, seed=seed)
    projection = random_keys(3, 64, dim, seed=seed + 1)
    found = quantize_query(query, projection)
    assert rounded(found).shape == (2, 3, group, 64)
    assert found.scale.shape == (2, 3)
    projected = query.double() @ projection.double().mT
    assert rounded(found).abs().amax((-2, -1)).eq(127).all()
    off = rounded(found).double() - projected / found.scale.double()[..., None, None]
    assert off.abs().max() <= 0.5 + 1e-4
    # A ranking by codes is a ranking by the projected query, up to this rounding.
    torch.testing.assert_close(
        rounded(found) * found.scale[..., None, None],
        projected.float(),
        rtol=0,
        atol=float(found.scale.max()) * 0.51,
    )


def test_query_is_rounded_half_to_even():
    projection = torch.eye(64)[:, :64]
    query = torch.zeros(1, 64)
    query[0, :5] = torch.tensor([127.0, 0.5, 1.5, -0.5, -2.5])
    assert rounded(quantize_query(query, projection))[0, :5].tolist() == [127, 0, 2, 0, -2]


def test_autocast_changes_nothing():
    keys, projection = random_keys(500, 64), random_keys(64, 64, seed=1)

    def everything():
        encoded, query = encode(keys, projection), quantize_query(keys[:4], projection)
        return encoded.codes, encoded.gain, query.tables, hash_scores(query, encoded.codes, encoded.gain)

    plain = everything()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(plain, everything(), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    group=st.sampled_from(GROUPS),
    heads=st.integers(1, 5),
    count=st.integers(1, 150),
    floating=st.booleans(),
    logit=st.sampled_from([None, 0.01, 700, 187_500, 3_000_000, math.inf]),
    seed=st.integers(0, 1000),
)
def test_the_scores_of_a_group_are_combined_into_one(group, heads, count, floating, logit, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-(1 << 22), 1 << 22, (2, heads, count), generator=generator, dtype=torch.int32)
    valid = torch.rand(2, count, generator=generator) < 0.8
    if floating:
        scores = scores.double() / 1000
        logit = logit and min(logit, 1e6) / 1000
    logits = None if logit is None else torch.full((2,), logit, dtype=torch.float64 if floating else torch.float32)
    found = group_scores(scores, group, valid=valid, logit=logits)
    assert found.dtype == scores.dtype
    for row in range(2):
        kept = valid[row].nonzero().flatten()
        if len(kept):
            expected = literal.group_scores(scores[row][:, kept].tolist(), group, logit, kept.tolist())
            assert found[row, kept].tolist() == pytest.approx(expected, abs=1e-6 if floating else 0)
    if valid.all():
        assert torch.equal(found, group_scores(scores, group, logit=logits))


def test_heads_with_small_scores_count():
    scores = torch.tensor([[1_000_000, 999_999, 999_998, 5], [1, 2, 3, 700]], dtype=torch.int32)
    assert group_scores(scores, "max").tolist() == [1_000_000, 999_999, 999_998, 700]
    # 8 times the smaller distance, plus both distances: key 0 is the best of head 0, and key 3 of head 1.
    assert group_scores(scores, "relative").tolist() == [-699, -707, -715, -999_995]
    assert group_scores(scores[:1], "relative").tolist() == [0, -5, -10, -4_999_975]


def test_a_key_ranks_by_its_weight():
    weights = torch.tensor([[0.6, 0.3, 0.1, 1e-9], [0.25, 0.2, 0.3, 0.25]]).double()
    scores = 7 * weights.log() + torch.tensor([[3.0], [-100]])  # a softmax ignores a constant of a head
    own = weights.log()
    limited = own.clamp(min=-16)
    expected = 8 * own.amax(0) + limited.sum(0)
    torch.testing.assert_close(group_scores(scores, "relative", logit=7), 7 * expected)
    units = (30_000 * scores / 7).round().to(torch.int32)
    found = group_scores(units, "relative", logit=torch.tensor(30_000.0))
    torch.testing.assert_close(found / 30_000, expected.float(), rtol=0, atol=1)  # ten distances
    # By distance from the best scores, the best key of the flat head, key 2, would rank second.
    assert found.argsort(descending=True).tolist() == [0, 1, 2, 3]
    assert group_scores(scores, "relative").argsort(descending=True).tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("logit", [300.0, 20_000.0, 180_000.0])
@pytest.mark.parametrize("count", [1, 60, 64, 1000])
def test_an_integer_denominator_is_that_of_the_best_keys_of_64_stripes(logit, count):
    spread = torch.linspace(0.1, 8, 50).unsqueeze(-1)
    scores = (spread * logit * torch.randn(50, count, generator=torch.Generator().manual_seed(count))).int()
    scores = scores.clamp(-(1 << 22), 1 << 22)
    found = group_scores(scores.unsqueeze(1), "relative", logit=logit)[..., 0]
    stripes = torch.nn.functional.pad(scores.double(), (0, -count % 64), value=-math.inf).unflatten(-1, (-1, 64))
    exact = (stripes.amax(-2) / logit).logsumexp(-1)
    distance = exact - scores[:, 0] / logit
    torch.testing.assert_close(found / logit, (-4 * distance - distance.clamp(max=16)).float(), rtol=0, atol=0.5)


@pytest.mark.parametrize("heads", [8, 40, 71, 128])
def test_the_scores_of_large_groups_fit_int32(heads):
    largest = 127 * 128 * 287
    scores = torch.full((heads, 3), -largest, dtype=torch.int32)
    scores[:, 0] = largest
    scores[0, 1] = 0
    for logit in (None, 50_000, math.inf):
        found = group_scores(scores, "relative", logit=logit).tolist()
        assert 0 >= found[0] > found[1] >= found[2] >= -(1 << 31)
        if heads <= 40:
            assert found == literal.group_scores(scores.tolist(), "relative", logit)


def test_a_zero_query_scores_every_key_zero():
    query = quantize_query(torch.zeros(2, 64), random_keys(64, 64))
    assert query.scale == 0
    assert rounded(query).eq(0).all()
    assert hash_scores(query, torch.tensor([[5], [-1]])).eq(0).all()


@pytest.mark.parametrize("bits", bit_lists)
def test_scores_of_nibbles_are_products_with_the_sums_of_their_vectors(bits):
    nibbles, vectors = torch.randint(16, (3, 50, bits // 4)), random_keys(3, 4 * bits, 24)
    query = random_keys(3, 5, 24, seed=1)
    found = quantize_query(query, vectors, nibbles=True)
    gain = torch.randint(0, 256, (3, 50)).byte()
    scores = hash_scores(found, pack_nibbles(nibbles), gain)
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles), bits), nibbles)
    keys = vectors.gather(1, named(nibbles).flatten(1).unsqueeze(-1).expand(-1, -1, 24)).unflatten(1, (50, -1)).sum(2)
    exact = query.double() @ keys.double().mT / found.scale.double()[:, None, None]
    assert ((scores / (gain.int() + 32).unsqueeze(1)) - exact).abs().max() <= bits / 8 + 0.1  # half a unit per nibble
    assert found.tables.abs().amax((-3, -2, -1)).eq(LARGEST_SCORE // (bits // 4)).all()


def test_no_score_of_nibbles_leaves_its_range():
    for bits in bit_lists:
        query = quantize_query(torch.ones(1, 1), torch.ones(4 * bits, 1), nibbles=True)
        largest = hash_scores(query, torch.zeros(1, -(-bits // 64), dtype=torch.int64), torch.tensor([255]).byte())
        assert 0.99 * 2**23 < largest.item() < 2**23


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_projection_is_rounded_to_the_dtype_of_the_query(dtype):
    projection = random_keys(64, 32)
    query = random_keys(4, 32, seed=1).to(dtype)
    found = quantize_query(query, projection)
    assert torch.equal(rounded(found), rounded(quantize_query(query.float(), projection.to(dtype).float())))


def test_refuses_an_unknown_group():
    with pytest.raises(InputError, match=r"^group must be one of relative, max, not 'sum'$"):
        group_scores(torch.ones(2, 5, dtype=torch.int32), "sum")


def test_refuses_bad_arguments():
    query = quantized(torch.ones(2, 64))
    with pytest.raises(InputError, match=r"codes of 64 bits must be int64 \[..., N, 1\]"):
        hash_scores(query, torch.zeros(5, 2, dtype=torch.int64))
    with pytest.raises(InputError, match="gain must be uint8"):
        hash_scores(query, torch.zeros(5, 1, dtype=torch.int64), torch.ones(4, dtype=torch.uint8))
    with pytest.raises(InputError, match="do not fit"):
        quantize_query(torch.ones(2, 8), torch.ones(64, 9))
    with pytest.raises(InputError, match="bits must be"):
        quantize_query(torch.ones(2, 8), torch.ones(48, 8))
