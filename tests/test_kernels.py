"""Every kernel against its torch oracle: in Triton's interpreter, and as compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch
from drawn import DEVICE, EXACT, FLOAT64, cache, draw, integers

from bpc_calib import hash_scores, quantize_query, select
from bpc_calib.backends import plain
from bpc_calib.backends.triton import attend as attending
from bpc_calib.backends.triton import backend, hashing, ops, pipeline
from bpc_calib.backends.triton.plan import PLAN_LOW, PLAN_SHIFT
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.encoded import GAIN_MAX
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.nibbles import encode_nibbles
from bpc_calib.method.rules import Rules
from bpc_calib.method.scoring import LARGEST_SCORE, LEAST, STRIPES
from bpc_calib.method.selection import worst_first
from bpc_calib.method.state import Rows, State, alike
from bpc_calib.method.step import attend, dense_decode
from bpc_calib.method.step import rank as plain_rank

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def layer(batch, kv_heads, tokens, dim, bits, k, *, dtype=torch.float32, nibbles=False, **more):
    """A codebook, what is cached of random keys, and sequences that attend to `k` of them."""
    if nibbles:
        codebook = make_codebook(draw(kv_heads, 4 * bits, dim, seed=1) / dim**0.5, dtype, nibbles=True)
        keys = draw(batch, kv_heads, tokens, dim, seed=2, dtype=dtype)
        encoded = encode_with(codebook, keys)
        return codebook, State(keys, keys, encoded.codes, encoded.gain, encoded.error), alike(keys, k)
    projection, encoded = cache(batch, kv_heads, tokens, dim, bits, **more)
    keys = draw(batch, kv_heads, tokens, dim, seed=2, dtype=dtype)
    state = State(keys, keys, encoded.codes, encoded.gain, encoded.error)
    return make_codebook(projection, dtype), state, alike(keys, k)


@pytest.mark.emulated(group=["relative"], heads=[1, 16])
@pytest.mark.parametrize("group", ["relative", "max"])
@pytest.mark.parametrize(("heads", "bits"), [(1, 64), (4, 128), (16, 128)])
def test_the_largest_scores_there_can_be(group, heads, bits):
    codebook = make_codebook(torch.eye(bits, device=DEVICE).unsqueeze(0), torch.float32)
    query = torch.ones(1, 1, heads, bits, device=DEVICE)
    query[..., ::2] = -1
    codes = torch.randint(-(2**63), 2**63 - 1, (1, 1, 200, bits // 64), generator=torch.Generator().manual_seed(0))
    codes = codes.to(DEVICE)
    codes[..., 50, :] = 0xAAAAAAAAAAAAAAAA - 2**64  # bits 1, 3, ...: the query itself
    codes[..., 60, :] = 0x5555555555555555
    gain = torch.full((1, 1, 200), GAIN_MAX, dtype=torch.uint8, device=DEVICE)
    keys, rules = torch.zeros(1, 1, 200, bits, device=DEVICE), Rules(group=group, scaling=0.1)
    state, rows = State(keys, keys, codes, gain), alike(keys, 9)
    made = pipeline.score(query, codebook, state, rows, rules)
    pipeline.rank(made, state, rows, rules)
    rounded = pipeline.quantized(made, 1)
    assert rounded.tables.amax(-1).eq(4 * 127).all()
    scores = hash_scores(rounded, codes, gain)
    assert scores.max() == 127 * bits * 287
    ranked = plain_rank(scores, rounded.scale, group=group, gain=True, scaling=0.1)
    assert torch.equal(made.ranked[:, :200], ranked[0])
    assert torch.equal(pipeline.take(made, 9), select(ranked, 9)[0])


@pytest.mark.emulated(group=["relative"], bits=[64])
@pytest.mark.parametrize("group", ["relative", "max"])
@pytest.mark.parametrize("bits", [32, 64, 128])
def test_the_largest_scores_of_nibbles(group, bits):
    """One below the other for two heads: every key scores the largest number or its negative."""
    codebook = make_codebook(torch.ones(1, 4 * bits, 16, device=DEVICE), torch.float32, nibbles=True)
    query = torch.ones(1, 1, 2, 16, device=DEVICE)
    query[:, :, 1] = -1
    codes = torch.randint(-(2**63), 2**63 - 1, (1, 1, 100, -(-bits // 64)), device=DEVICE)
    gain = torch.arange(156, 256, dtype=torch.uint8, device=DEVICE).view(1, 1, 100)
    keys, rules = torch.zeros(1, 1, 100, 16, device=DEVICE), Rules(group=group, scaling=0.1)
    state, rows = State(keys, keys, codes, gain), alike(keys, 9)
    made = pipeline.score(query, codebook, state, rows, rules)
    pipeline.rank(made, state, rows, rules)
    rounded = pipeline.quantized(made, 1)
    largest = LARGEST_SCORE // (bits // 4)
    assert rounded.tables[0, 0].amax((-2, -1)).tolist() == [largest, -largest]
    scores = hash_scores(rounded, codes & (2**32 - 1) if bits == 32 else codes, gain)
    assert scores.max() == largest * (bits // 4) * 287
    ranked = plain_rank(scores, rounded.scale, group=group, gain=True, scaling=0.1)
    assert torch.equal(made.ranked[:, :100], ranked[0])
    assert torch.equal(pipeline.take(made, 9), select(ranked, 9)[0])


@pytest.mark.emulated(nibbles=[False])
@pytest.mark.emulated(nibbles=[True], dtype=[torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nibbles", [False, True])
@pytest.mark.parametrize("dtype", [*FLOAT64, torch.float32, torch.bfloat16, torch.float16])
def test_rounded_queries(dtype, nibbles):
    """Across a product that rounds in its own order: few products differ, by one."""
    codebook, state, rows = layer(3, 2, 8, 128, 64, 2, dtype=dtype, nibbles=nibbles)
    query = draw(3, 2, 4, 128, seed=3, dtype=dtype)
    query[1, 0] = 0
    made = pipeline.score(query, codebook, state, rows, Rules())
    found, expected = pipeline.quantized(made, 3), quantize_query(query, codebook.projection, nibbles=nibbles)
    apart = (found.tables.int() - expected.tables.int()).abs()
    assert apart.max() <= 1
    # Of 6,144 entries; of signs a product is in 16 of them, and of nibbles in one, with 14 times the steps.
    assert apart.sum() <= 16 * 4
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-6, atol=0)


@pytest.mark.emulated(heads=[9])
@pytest.mark.parametrize("heads", [1, 4, 9])
def test_queries_too_small_to_invert(heads):
    """127 over the largest overflows: values go to the ends of their range, and zeros stay zeros."""
    projection = torch.eye(32, device=DEVICE).expand(2, 32, 32).clone()
    projection[:, 5:] = 0
    query = torch.full((1, 2, heads, 32), 1e-41, device=DEVICE)
    _, state, rows = layer(1, 2, 8, 32, 32, 2)
    made = pipeline.score(query, make_codebook(projection, torch.float32), state, rows, Rules())
    found = pipeline.quantized(made, 1)
    assert torch.equal(found.tables, quantize_query(query, projection).tables)
    assert found.tables[..., 15].flatten(0, -2).eq(torch.tensor([508, 127, *(6 * [0])], device=DEVICE)).all()


@pytest.mark.emulated
@pytest.mark.parametrize("nibbles", [False, True])
def test_scores_and_their_histogram(nibbles):
    """The lowest bin is left out: it counts tokens that do not rank, too, and no result depends on it."""
    codebook, state, rows = layer(2, 2, 1500, 64, 64, 50, zero_keys=True, nibbles=nibbles)
    query, rules = draw(2, 2, 4, 64, seed=3), Rules(scaling=0.1, recent=2, sink=1)
    made = pipeline.score(query, codebook, state, rows, rules)
    pipeline.rank(made, state, rows, rules)
    rounded = pipeline.quantized(made, 2)
    scores = hash_scores(rounded, state.codes, state.gain)
    plain = hash_scores(rounded, state.codes).mT.flatten(0, 1)
    assert torch.equal(made.heads[:, :1500].int(), plain)
    stripes = torch.nn.functional.pad(scores, (0, -1500 % STRIPES), value=LEAST).unflatten(-1, (-1, STRIPES)).amax(-2)
    assert torch.equal(made.best.mT.unflatten(0, (2, 2)), stripes)
    ranked = plain_rank(scores, rounded.scale, group="relative", gain=True, scaling=0.1).flatten(0, 1)
    assert torch.equal(made.ranked[:, 1:1498], ranked[:, 1:1498])
    assert (made.ranked[:, [0, 1498, 1499]] == 2**31 - 1).all()
    low, shift = made.plan[:, PLAN_LOW.value, None], made.plan[:, PLAN_SHIFT.value, None]
    for row, digits in enumerate((ranked - low) >> shift):
        expected = torch.bincount(digits[1:1498], minlength=pipeline.COARSE)
        assert expected[1:].count_nonzero() > 3
        assert torch.equal(made.counts[row, 1 : pipeline.COARSE], expected[1:].int())


@pytest.mark.emulated(dtype=[torch.float32])
@pytest.mark.emulated(dtype=FLOAT64, bits=[32])
@pytest.mark.parametrize("bits", [32, 64, 128])
@pytest.mark.parametrize("dtype", [*FLOAT64, torch.float32])
def test_nibbles_from_the_same_products_are_exact(bits, dtype):
    """Of small integers, too, where most costs are equal to others."""
    scores, gram = draw(2, 5, 4 * bits, dtype=dtype), 0.3 * draw(2, 4 * bits, 4 * bits, seed=1, dtype=dtype)
    scores[1], gram[1] = scores[1].round(), gram[1].round()
    scores[:, 3] = 0
    norm = 50 * draw(2, 5, seed=2, dtype=dtype).abs()
    norm[1, 4] = 0
    found, expected = pipeline.encode_nibbles(scores, gram, norm), encode_nibbles(scores, gram, norm)
    for name in ("codes", "error", "gain"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


NIBBLES = [  # dtype, head_dim, bits
    (torch.bfloat16, 128, 64), (torch.float32, 80, 32), (torch.float16, 64, 128), *((each, 64, 32) for each in FLOAT64)
]  # fmt: skip


@pytest.mark.emulated(dtype=[torch.bfloat16, torch.float32], tokens=[3, 70])
@pytest.mark.emulated(dtype=[torch.float16, *FLOAT64], tokens=[3])
@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize(("dtype", "dim", "bits"), NIBBLES)
def test_nibbles_of_keys(dtype, dim, bits, tokens, monkeypatch):
    """With metric and mean, in pieces, of numbers that every product and sum holds exactly: so codes are equal bits."""
    monkeypatch.setattr(hashing, "SCRATCH", 1)  # a block at once
    vectors, metric, mean = exact_parts(2, 4 * bits, dim)
    if dtype == torch.bfloat16:  # of each sequence, as a prompt makes them
        vectors, mean = (torch.stack([each, each]) for each in (vectors, mean))
        metric = torch.stack([metric, metric.flip(-1, -2)])
    codebook = make_codebook(vectors, dtype, metric=metric, mean=mean, nibbles=True)
    keys = integers(2, tokens, 2, dim, most=9, seed=4).to(dtype).transpose(1, 2)  # not contiguous
    keys[:, :, 2] = 0
    found, expected = pipeline.encode_with(codebook, keys), encode_with(codebook, keys)
    for name in ("codes", "error", "gain"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def exact_parts(kv_heads, rows, dim):
    """A projection, a metric and a mean, of numbers that every product and sum holds exactly."""
    vectors = integers(kv_heads, rows, dim, most=2, seed=1) / 8
    root = integers(kv_heads, dim, dim, most=1, seed=2) * (torch.rand(dim, generator=seeded(3)).to(DEVICE) < 0.1)
    return vectors, root + root.mT + 8 * torch.eye(dim, device=DEVICE), vectors[..., 0, :] * 8


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.emulated
@pytest.mark.parametrize("own", [False, True])
def test_nibbles_of_a_new_token(own):
    """Key, value, code, gain and error, in their slots and nowhere else; with a codebook of each sequence, too."""
    vectors, metric, mean = exact_parts(3, 256, 64)
    if own:
        vectors = torch.stack([vectors, vectors.flip(-1)])
    codebook = make_codebook(vectors, torch.bfloat16, metric=metric, mean=mean, nibbles=True)
    key, value = (integers(2, 3, 1, 64, most=9, seed=seed).to(torch.bfloat16) for seed in (4, 5))
    filled = []
    for module in (plain, backend):
        state = State(
            *(torch.full((2, 3, 20, 64), 7, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)),
            torch.full((2, 3, 20, 1), 7, device=DEVICE), torch.full((2, 3, 20), 7, dtype=torch.uint8, device=DEVICE),
            torch.full((2, 3, 20), 7.0, device=DEVICE),
        )  # fmt: skip
        module.append(state, codebook, key, value, torch.tensor([13], device=DEVICE))
        filled.append(state)
    for name in ("keys", "values", "codes", "gain", "error"):
        assert torch.equal(*(getattr(state, name) for state in filled)), name


@pytest.mark.emulated
def test_attention_over_everything():
    query, keys, values = draw(2, 2, 4, 64), draw(2, 2, 150, 64, seed=1), draw(2, 2, 150, 64, seed=2)
    lengths = torch.tensor([150, 70], device=DEVICE)
    state, rows = State(keys, values), replace(alike(keys, 150), lengths=lengths)
    everything = torch.arange(150, device=DEVICE).expand(2, 2, -1)
    expected = attend(query, state, rows, everything.where(everything < lengths.view(2, 1, 1), -1))
    found = pipeline.attend(query, state, rows, None)
    torch.testing.assert_close(found, expected, rtol=EXACT[torch.float32], atol=EXACT[torch.float32])


VERIFIED = [  # new tokens, query heads of a KV head, head_dim, dtype: 16 to 128 queries at once, and more than that
    (2, 1, 64, torch.float16), (5, 4, 128, torch.bfloat16), (2, 7, 80, torch.float32), (8, 7, 128, torch.bfloat16),
    (8, 7, 64, torch.float16), (5, 4, 64, torch.float32), (8, 4, 128, torch.float32), (17, 4, 128, torch.bfloat16),
    (5, 7, 256, torch.bfloat16), *((5, 4, 64, each) for each in FLOAT64),
]  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize(("new", "heads", "dim", "dtype"), VERIFIED)
def test_attention_of_new_tokens_to_those_up_to_each(new, heads, dim, dtype, monkeypatch):
    """In two parts of several blocks, of which the second ends early, and of a buffer with more room."""
    monkeypatch.setattr(attending, "SPLITS", 4)
    tokens = 270
    query = draw(2, 1, heads * new, dim, dtype=dtype)
    keys, values = (draw(2, 1, tokens + 30, dim, seed=seed, dtype=dtype) for seed in (1, 2))
    rows = alike(keys[:, :, :tokens], tokens)
    found = backend.dense_decode(query, State(keys, values), rows, 0.3, new=new)
    exact = State(keys.double(), values.double())
    expected = dense_decode(query.double(), exact, rows, 0.3, new=new)
    torch.testing.assert_close(found, expected.to(dtype), rtol=EXACT[dtype], atol=EXACT[dtype])
    for behind in (keys, values):
        behind[:, :, tokens:] = 1e4
    assert torch.equal(backend.dense_decode(query, State(keys, values), rows, 0.3, new=new), found)


@pytest.mark.emulated(mean=[150])
@pytest.mark.parametrize("mean", [None, 20, 150, 1000])
def test_attention_over_lists_of_different_lengths(mean):
    counts, width = (1000, 3, 128, 65), 1000
    query, keys, values = draw(2, 2, 4, 64), draw(2, 2, 1200, 64, seed=1), draw(2, 2, 1200, 64, seed=2)
    lists = torch.full((4, width), -1)
    for row, count in enumerate(counts):
        lists[row, :count] = torch.randperm(1200, generator=torch.Generator().manual_seed(row))[:count].sort().values
    indices, lengths = lists.view(2, 2, width).to(DEVICE), torch.full((2,), 1200, device=DEVICE)
    rows, state = Rows(lengths, torch.tensor(counts, device=DEVICE).view(2, 2), 1200, width), State(keys, values)
    found = pipeline.attend(query, state, rows, indices, mean=mean)
    torch.testing.assert_close(found, attend(query, state, rows, indices), rtol=1e-5, atol=1e-5)


@pytest.mark.emulated
def test_the_same_every_time():
    """Of a GPU: the interpreter runs programs one after the other."""
    given = (draw(1, 2, 4, 64, seed=3), *layer(1, 2, 1500, 64, 64, 300), Rules())
    made = [pipeline.sparse_decode(*given) for _ in range(3)]
    assert all(torch.equal(one, other) for again in made[1:] for one, other in zip(made[0], again, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_step_in_a_cuda_graph():
    """Captured once, then replayed with other queries and other lengths."""
    codebook, state, rows = layer(1, 2, 2100, 64, 64, 60)
    query, rules = draw(1, 2, 4, 64, seed=3), Rules(recent=1)

    def step():
        return backend.sparse_decode(query, codebook, state, rows, rules)

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
        rows.lengths.fill_(length)
        graph.replay()
        assert all(map(torch.equal, replayed, step()))


@pytest.mark.emulated
def test_operators_tell_their_shapes():
    """What `torch.compile` and CUDA graphs need of an operator, by torch's own check."""
    codebook, state, _ = layer(2, 2, 40, 64, 64, 7)
    of_nibbles = make_codebook(draw(2, 128, 64, seed=1), torch.float32, nibbles=True)
    query, keys = draw(2, 2, 4, 64, seed=3), state.keys
    valid = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    lengths, k = torch.tensor([40, 9], device=DEVICE), torch.tensor([[5], [7]], device=DEVICE)
    table, rules = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device=DEVICE), (0.1, "relative", 1, 0)
    pages = [each[:, :, :16] for each in (keys, keys, state.codes, state.gain)]
    matrices, slots = (codebook.matrix, codebook.gram, None, None, False), (keys.clone(), keys.clone())
    new = (keys[:, :, :1], keys[:, :, 1:2], torch.tensor([7], device=DEVICE))
    for operator, *arguments in (
        (ops.sparse_decode, query, codebook.projection, False, keys, keys, state.codes, state.gain,
         worst_first(state.error), None, None, lengths, k, 40, 7, valid, None, *rules, 0.2),
        (ops.sparse_decode, query, codebook.projection, False, keys, keys, state.codes, None, None,
         None, None, lengths, k, 40, 9, None, None, *rules, 0.0),
        (ops.sparse_decode, query, codebook.projection, False, *pages, None,
         None, None, lengths - 8, k.clamp(max=1), 32, 7, None, table, *rules, 0.0),
        (ops.dense_decode, query, keys, keys, lengths, 40, 0.1),
        (ops.dense_decode, query, keys, keys, lengths, 40, 0.1, 2),
        (ops.append, *matrices, *new, *slots, state.codes, state.gain, None),
        (ops.encode, *matrices, keys),
        (ops.encode, of_nibbles.matrix, of_nibbles.gram, None, None, True, keys[:, :, :2]),
    ):  # fmt: skip
        torch.library.opcheck(operator, tuple(arguments), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.emulated
def test_dense_attention_beyond_the_buffer():
    query, keys = draw(1, 2, 4, 64, seed=3), draw(1, 2, 60, 64, seed=2)
    state, rows = State(keys, keys), alike(keys, 60)
    everything = torch.arange(60, device=DEVICE).expand(1, 2, -1)
    dense = pipeline.attend(query, state, replace(rows, lengths=rows.lengths + 15), None)
    expected = attend(query, state, rows, everything)
    torch.testing.assert_close(dense, expected, rtol=EXACT[torch.float32], atol=EXACT[torch.float32])
