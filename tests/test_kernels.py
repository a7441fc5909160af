"""Every kernel against its torch oracle: in Triton's interpreter, and as compiled where there is a GPU."""

import pytest
import torch

from bpc_calib import InputError, choosing, encode, hash_scores, quantize_query, select
from bpc_calib.encoding import GAIN_MAX, encode_gram, encode_with, make_encoder
from bpc_calib.kernels import ops, pipeline
from bpc_calib.scoring import QuantizedQuery
from bpc_calib.selection import worst_first
from bpc_calib.sparse_attention import sparse_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

# From compute capability 10 on Triton's compiler breaks off at products of float64.
FLOAT64 = [] if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0) else [torch.float64]
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def cache(batch, kv_heads, tokens, dim, bits, *, zero_keys=False, dtype=torch.float32):
    """Projections, and codes, gains and errors of keys under them."""
    projection = draw(kv_heads, bits, dim, seed=1) / (2 * dim**0.5)
    keys = draw(batch, kv_heads, tokens, dim, seed=2, dtype=dtype)
    if zero_keys:
        keys[:, :, ::3] = 0
    return projection, encode(keys, projection)


def both(query, projection, encoded, k, *, group="relative", gain=True, scaling=0.1, valid=None, lengths=None, **rules):
    """What the kernels choose, and what the oracle does from the same int8 queries."""
    codes, gains = encoded.codes, encoded.gain if gain else None
    found = pipeline.choose(
        query, projection, codes, gains, k, scaling=scaling, group=group, valid=valid, lengths=lengths, **rules
    )
    forced = {"recent": 0, "sink": 0, "safeguard": 0.0} | {
        n: v for n, v in rules.items() if n not in ("worst", "width")
    }
    made = pipeline.prepare(
        query, projection, k, codes.shape[2], group=group, gain=gain, scaling=scaling, valid=valid, lengths=lengths,
        **forced,
    )  # fmt: skip
    rules = {"recent": 0, "sink": 0, "worst": None, "safeguard": 0.0, "width": None} | rules
    expected = choosing.choose_asked(
        pipeline.quantized(made, len(query)), codes, gains, k, scaling=scaling, group=group, valid=valid,
        lengths=lengths, **rules,
    )  # fmt: skip
    return found, expected


SHAPES = {  # batch, heads on a KV head, head_dim, bits, tokens
    "usual": (1, 4, 128, 64, 1000),
    "one head": (2, 1, 64, 64, 513),
    "five heads": (1, 5, 80, 32, 300),
    "seven heads": (1, 7, 96, 128, 257),
    "eight heads": (1, 8, 256, 64, 700),
    "sixteen heads": (1, 16, 64, 32, 600),
    "sixteen heads of 128 bits": (1, 16, 64, 128, 90),
    "more than a block of each kind": (1, 2, 64, 64, 2100),
    "one token": (1, 4, 64, 64, 1),
}


@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("group", ["relative", "max", "sum"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chooses_what_the_oracle_chooses(shape, group, gain):
    batch, heads, dim, bits, tokens = SHAPES[shape]
    projection, encoded = cache(batch, 2, tokens, dim, bits)
    found, expected = both(
        draw(batch, 2, heads, dim, seed=3), projection, encoded, -(-tokens // 9), group=group, gain=gain
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("k", [1, 2, 59, 60])
@pytest.mark.parametrize("rules", [{}, {"recent": 1, "sink": 4}, {"recent": 7}, {"recent": 1, "safeguard": 0.5}])
def test_every_k(k, rules):
    projection, encoded = cache(1, 2, 60, 64, 64)
    if "safeguard" in rules:
        rules = rules | {"worst": worst_first(encoded.error)}
    found, expected = both(draw(1, 2, 4, 64, seed=3), projection, encoded, k, **rules)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("group", ["relative", "max", "sum"])
def test_all_ties_go_to_the_lowest_indices(group):
    projection, encoded = cache(1, 2, 2100, 64, 64)
    found, expected = both(torch.zeros(1, 2, 4, 64, device=DEVICE), projection, encoded, 40, group=group)
    assert found[0].tolist() == [list(range(40))] * 2
    assert torch.equal(found, expected)
    found, expected = both(
        torch.zeros(1, 2, 4, 64, device=DEVICE), projection, encoded, 40, group=group, recent=3, sink=2
    )
    assert found[0].tolist() == [[*range(37), 2097, 2098, 2099]] * 2
    assert torch.equal(found, expected)


def test_few_scores_so_many_ties():
    projection, encoded = cache(1, 1, 1500, 64, 32)
    encoded.codes[:, :, :] = encoded.codes[:, :, :5].repeat(1, 1, 300, 1)
    for k in (7, 300, 301, 777):
        found, expected = both(draw(1, 1, 4, 64, seed=3), projection, encoded, k, gain=False)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("group", ["relative", "max", "sum"])
@pytest.mark.parametrize(("heads", "bits"), [(1, 64), (4, 128), (16, 128)])
def test_the_largest_scores_there_can_be(group, heads, bits):
    projection = torch.eye(bits, device=DEVICE).unsqueeze(0)
    query = torch.ones(1, 1, heads, bits, device=DEVICE)
    query[..., ::2] = -1
    codes = torch.randint(-(2**63), 2**63 - 1, (1, 1, 200, bits // 64), generator=torch.Generator().manual_seed(0))
    codes = codes.to(DEVICE)
    codes[..., 50, :] = 0xAAAAAAAAAAAAAAAA - 2**64  # bits 1, 3, ...: the query itself
    codes[..., 60, :] = 0x5555555555555555
    gain = torch.full((1, 1, 200), GAIN_MAX, dtype=torch.uint8, device=DEVICE)
    made = pipeline.prepare(query, projection, 9, 200, group=group, gain=True, scaling=0.1)
    assert made.values.abs().eq(127).all()
    pipeline.rank(made, codes, gain, group=group, valid=None, worst=None)
    asked = pipeline.quantized(made, 1)
    scores = hash_scores(asked, codes, gain)
    assert scores.max() == 127 * bits * 287
    ranked = choosing.rank(scores, asked.scale, group=group, gain=True, scaling=0.1)
    assert torch.equal(made.ranked[:, :200], ranked[0])
    assert torch.equal(pipeline.take(made, 9, ragged=False), select(ranked, 9)[0])


@pytest.mark.parametrize("rules", [{}, {"recent": 3, "sink": 2}, {"recent": 1, "sink": 1, "safeguard": 0.4}])
def test_padded_sequences_in_a_larger_buffer(rules):
    """Holes, another length and another k for each sequence; tokens, heads and sequences apart in memory."""
    batch, tokens, room = 3, 200, 256
    projection, encoded = cache(batch, 2, tokens, 64, 64)
    codes = torch.full((batch, 2, room, 1), -1, device=DEVICE)[:, :, :tokens]
    gain = torch.full((room, 2, batch), 255, dtype=torch.uint8, device=DEVICE).permute(2, 1, 0)[:, :, :tokens]
    encoded = type(encoded)(codes.copy_(encoded.codes), encoded.error, gain.copy_(encoded.gain))
    valid = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(7)).to(DEVICE) > 0.3
    valid[1, :90] = False
    lengths = torch.tensor([200, 150, 97], device=DEVICE)
    real = valid & (torch.arange(tokens, device=DEVICE) < lengths[:, None])
    k = (real.sum(-1, keepdim=True) // torch.tensor([[9], [2], [1]], device=DEVICE)).clamp(min=1)
    if "safeguard" in rules:
        rules = rules | {"worst": worst_first(encoded.error)}
    query = draw(batch, 2, 4, 64, seed=3)
    found, expected = both(query, projection, encoded, k, valid=valid, lengths=lengths, **rules)
    assert torch.equal(found, expected)
    found, expected = both(query, projection, encoded, k.clamp(max=9), lengths=lengths, width=12, **rules)
    assert torch.equal(found, expected)
    assert (found[..., 9:] == -1).all()
    apart = torch.tensor([[5, 9], [1, 2], [3, 0]], device=DEVICE)  # of each head
    found, expected = both(query, projection, encoded, apart, valid=valid, lengths=lengths[:1].expand(3), **rules)
    assert torch.equal(found, expected)


def test_a_list_wider_than_k_ends_in_minus_one():
    projection, encoded = cache(1, 2, 257, 64, 64)
    found, expected = both(draw(1, 2, 4, 64, seed=3), projection, encoded, 49, width=52)
    assert torch.equal(found, expected)
    assert (found[..., 49:] == -1).all()


def test_a_length_beyond_the_buffer_is_the_buffer():
    projection, encoded = cache(1, 2, 60, 64, 64)
    query, lengths = draw(1, 2, 4, 64, seed=3), torch.tensor([75], device=DEVICE)
    found, expected = both(query, projection, encoded, 9, lengths=lengths)
    assert torch.equal(found, expected)
    keys = draw(1, 2, 60, 64, seed=2)
    everything = torch.arange(60, device=DEVICE).expand(1, 2, -1)
    dense = pipeline.sparse_attention(query, keys, keys, None, lengths=lengths)
    expected = sparse_attention(query, keys, keys, everything)
    torch.testing.assert_close(dense, expected, rtol=EXACT[torch.float32], atol=EXACT[torch.float32])


def test_nothing_behind_the_length_is_read():
    projection, encoded = cache(1, 2, 300, 64, 64)
    lengths = torch.tensor([257], device=DEVICE)
    query = draw(1, 2, 4, 64, seed=3)
    found, _ = both(query, projection, encoded, 20, lengths=lengths)
    encoded.codes[:, :, 257:] = -1
    encoded.gain[:, :, 257:] = 255
    again, _ = both(query, projection, encoded, 20, lengths=lengths)
    assert torch.equal(found, again)
    assert found.max() < 257


def test_codes_that_are_not_side_by_side():
    projection, encoded = cache(1, 2, 70, 64, 128)
    wide = torch.stack([encoded.codes, encoded.codes], dim=3).flatten(3)[..., :2]  # a gap behind every key
    assert wide.stride(2) == 4
    query = draw(1, 2, 4, 64, seed=3)
    found, expected = both(query, projection, type(encoded)(wide, encoded.error, encoded.gain), 9)
    assert torch.equal(found, expected)


def test_each_sequence_with_projections_of_its_own():
    projection, encoded = cache(2, 2, 90, 64, 64)
    own = torch.stack([projection, -projection.flip(1)]).mT.contiguous().mT  # not contiguous
    found, expected = both(draw(2, 2, 4, 64, seed=3), own, encoded, 9)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [*FLOAT64, torch.float32, torch.bfloat16, torch.float16])
def test_queries_in_int8(dtype):
    """Across a product that rounds in its own order: few entries differ, by one."""
    projection, _ = cache(3, 2, 8, 128, 64)
    query = draw(3, 2, 4, 128, seed=3, dtype=dtype)
    query[1, 0] = 0
    made = pipeline.prepare(query, projection, 2, 8, group="relative", gain=True, scaling=0.1)
    found, expected = pipeline.quantized(made, 3), quantize_query(query, projection)
    apart = (found.values.int() - expected.values.int()).abs()
    assert apart.max() <= 1
    assert apart.sum() <= 4  # of 1,536
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-6, atol=0)
    assert torch.equal(made.totals.unflatten(0, (3, 2)), found.values.int().sum(-1))


def test_scores_and_their_histogram():
    projection, encoded = cache(2, 2, 1500, 64, 64, zero_keys=True)
    query = draw(2, 2, 4, 64, seed=3)
    made = pipeline.prepare(query, projection, 50, 1500, group="relative", gain=True, scaling=0.1, recent=2, sink=1)
    pipeline.rank(made, encoded.codes, encoded.gain, group="relative", valid=None, worst=None)
    asked: QuantizedQuery = pipeline.quantized(made, 2)
    scores = hash_scores(asked, encoded.codes, encoded.gain)
    assert torch.equal(made.best.unflatten(0, (2, 2)), scores.amax(-1))
    ranked = choosing.rank(scores, asked.scale, group="relative", gain=True, scaling=0.1).flatten(0, 1)
    assert torch.equal(made.ranked[:, 1:1498], ranked[:, 1:1498])
    assert (made.ranked[:, [0, 1498, 1499]] == 2**31 - 1).all()
    low, shift = made.plan[:, 5:6], made.plan[:, 6:7]
    for row, digits in enumerate((ranked - low) >> shift):
        assert torch.equal(made.coarse[row], torch.bincount(digits[1:1498], minlength=pipeline.COARSE))


@pytest.mark.parametrize("bits", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_from_the_same_products_are_exact(bits, dtype):
    scores, gram = draw(2, 150, bits, dtype=dtype), 0.3 * draw(2, bits, bits, seed=1, dtype=dtype)
    scores[0, 7] = 0
    norm = 50 * draw(2, 150, seed=2, dtype=dtype).abs()
    norm[1, 3] = 0
    found, expected = pipeline.encode_gram(scores, gram, norm), encode_gram(scores, gram, norm)
    for name in ("codes", "error", "gain"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim", "bits"),
    [(torch.float32, 64, 64), (torch.bfloat16, 128, 64), (torch.float16, 80, 32), (torch.bfloat16, 256, 128),
     *((dtype, 96, 128) for dtype in FLOAT64)],
)  # fmt: skip
def test_codes_of_keys(dtype, dim, bits, measured):
    """With metric and mean and without; the keys strided, some of them zero."""
    projection = draw(2, bits, dim, seed=1) / (2 * dim**0.5)
    some = draw(2, dim, dim, seed=4)
    metric = some @ some.mT / dim + torch.eye(dim, device=DEVICE) if measured else None
    mean = draw(2, dim, seed=5) if measured else None
    keys = draw(2, 130, 2, dim, seed=2, dtype=dtype).transpose(1, 2)
    keys[:, :, 5] = 0
    encoder = make_encoder(projection, dtype, metric=metric, mean=mean)
    found, expected = pipeline.encode_with(encoder, keys), encode_with(encoder, keys)
    assert (found.codes != expected.codes).any(-1).sum() <= 2
    assert (found.gain.int() - expected.gain.int()).abs().max() <= 1
    torch.testing.assert_close(found.error, expected.error, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lead", [(), (1,), (2,), (1, 2), (3, 2), (3, 1)])
def test_projections_shared_by_heads_or_sequences(lead):
    projection = draw(*lead, 64, 64, seed=1) / 16
    some = draw(64, 64, seed=4)
    encoder = make_encoder(projection, torch.float32, metric=some @ some.mT / 64, mean=draw(64, seed=5))
    keys = draw(3, 2, 40, 64, seed=2)
    found, expected = pipeline.encode_with(encoder, keys), encode_with(encoder, keys)
    assert (found.codes != expected.codes).any(-1).sum() <= 2
    torch.testing.assert_close(found.error, expected.error, rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match="do not fit projections to 64 dimensions"):
        pipeline.encode_with(encoder, keys[..., :32])


@pytest.mark.parametrize("dtype", [*FLOAT64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "k"),
    [(4, 128, 700, 100), (1, 64, 90, 1), (16, 256, 300, 300), (5, 80, 200, 65), (7, 96, 64, 64), (2, 8, 40, 20)],
)
def test_attention_over_listed_tokens(dtype, heads, dim, tokens, k):
    query = draw(2, heads, 2, dim, dtype=dtype).transpose(1, 2)
    keys, values = (
        draw(2, tokens + 9, 2, dim, seed=seed, dtype=dtype).transpose(1, 2)[:, :, :tokens] for seed in (1, 2)
    )
    indices = torch.stack([torch.randperm(tokens)[:k].sort().values for _ in range(4)]).view(2, 2, k).to(DEVICE)
    if k > 64:
        indices[1, :, -3:] = -1
    found, expected = (
        pipeline.sparse_attention(query, keys, values, indices, 0.3),
        sparse_attention(query, keys, values, indices, 0.3),
    )
    torch.testing.assert_close(found, expected, rtol=EXACT[dtype], atol=EXACT[dtype])


def test_attention_over_nothing_is_zero():
    query, keys = draw(2, 2, 4, 64), draw(2, 2, 50, 64, seed=1)
    indices = torch.full((2, 2, 5), -1, device=DEVICE)
    indices[0] = torch.arange(5)
    found, expected = (
        pipeline.sparse_attention(query, keys, keys, indices),
        sparse_attention(query, keys, keys, indices),
    )
    assert (found[1] == 0).all()
    torch.testing.assert_close(found, expected, rtol=EXACT[torch.float32], atol=EXACT[torch.float32])


def test_attention_over_everything():
    query, keys, values = draw(2, 2, 4, 64), draw(2, 2, 150, 64, seed=1), draw(2, 2, 150, 64, seed=2)
    lengths = torch.tensor([150, 70], device=DEVICE)
    found = pipeline.sparse_attention(query, keys, values, None, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        everything = torch.arange(length, device=DEVICE).expand(2, -1)
        expected = sparse_attention(query[row], keys[row, :, :length], values[row, :, :length], everything)
        torch.testing.assert_close(found[row], expected, rtol=EXACT[torch.float32], atol=EXACT[torch.float32])


def test_the_same_every_time():
    """Of a GPU: the interpreter runs programs one after the other."""
    projection, encoded = cache(1, 2, 1500, 64, 64)
    query, keys = draw(1, 2, 4, 64, seed=3), draw(1, 2, 1500, 64, seed=2)
    made = []
    for _ in range(3):
        indices = pipeline.choose(query, projection, encoded.codes, encoded.gain, 300, scaling=0.1)
        made.append((indices, pipeline.sparse_attention(query, keys, keys, indices)))
    assert all(torch.equal(one, other) for again in made[1:] for one, other in zip(made[0], again, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_step_in_a_cuda_graph():
    """Captured once, then asked again with another query and another length."""
    projection, encoded = cache(1, 2, 2100, 64, 64)
    query, keys = draw(1, 2, 4, 64, seed=3), draw(1, 2, 2100, 64, seed=2)
    lengths = torch.tensor([2100], device=DEVICE)

    def step():
        indices = ops.choose(
            query,
            projection,
            encoded.codes,
            encoded.gain,
            60,
            None,
            0.1,
            "relative",
            None,
            lengths,
            1,
            0,
            None,
            0.0,
            60,
        )
        return indices, ops.sparse_attention(query, keys, keys, indices, 0.1)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for seed, length in ((3, 2100), (4, 1500), (5, 70)):
        query.copy_(draw(1, 2, 4, 64, seed=seed))
        lengths.fill_(length)
        graph.replay()
        assert all(map(torch.equal, replayed, step()))


def test_operators_tell_their_shapes():
    """What `torch.compile` and CUDA graphs need of an operator, by torch's own check."""
    projection, encoded = cache(2, 2, 40, 64, 64)
    query, keys = draw(2, 2, 4, 64, seed=3), draw(2, 2, 40, 64, seed=2)
    checks = ("test_schema", "test_faketensor")
    valid = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    ks = torch.tensor([[5], [7]], device=DEVICE)
    tail = (0.1, "relative", valid, None, 1, 0, worst_first(encoded.error), 0.2, 7)
    torch.library.opcheck(ops.choose, (query, projection, encoded.codes, encoded.gain, 0, ks, *tail), test_utils=checks)
    torch.library.opcheck(ops.choose, (query, projection, encoded.codes, None, 7, None, *tail), test_utils=checks)
    indices = torch.arange(9, device=DEVICE).expand(2, 2, 9)
    torch.library.opcheck(ops.sparse_attention, (query, keys, keys, indices, 0.1), test_utils=checks)
    lengths = torch.tensor([40, 9], device=DEVICE)
    torch.library.opcheck(ops.dense_attention, (query, keys, keys, lengths, 0.1), test_utils=checks)
    encoder = make_encoder(projection, keys.dtype)
    torch.library.opcheck(ops.encode, (encoder.matrix, encoder.gram, None, None, keys), test_utils=checks)
