"""Every kernel against its torch oracle: in Triton's interpreter, and as compiled where there is a GPU."""

import pytest
import torch
from drawn import DEVICE, EXACT, FLOAT64, cache, draw

from bpc_calib import hash_scores, quantize_query, select
from bpc_calib.backends.triton import backend, ops, pipeline
from bpc_calib.backends.triton.plan import PLAN_LOW, PLAN_SHIFT
from bpc_calib.method import choosing
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoded import GAIN_MAX
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.selection import worst_first
from bpc_calib.method.sparse_attention import sparse_attention

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.mark.emulated(group=["relative"], heads=[1, 16])
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
    cached, choice = Cached(codes, gain), Choice(0.1, group)
    made = pipeline.score(query, projection, cached, 9, choice)
    assert made.values.abs().eq(127).all()
    pipeline.rank(made, cached, choice)
    rounded = pipeline.quantized(made, 1)
    scores = hash_scores(rounded, codes, gain)
    assert scores.max() == 127 * bits * 287
    ranked = choosing.rank(scores, rounded.scale, group=group, gain=True, scaling=0.1)
    assert torch.equal(made.ranked[:, :200], ranked[0])
    assert torch.equal(pipeline.take(made, 9), select(ranked, 9)[0])


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [*FLOAT64, torch.float32, torch.bfloat16, torch.float16])
def test_queries_in_int8(dtype):
    """Across a product that rounds in its own order: few entries differ, by one."""
    projection, encoded = cache(3, 2, 8, 128, 64)
    query = draw(3, 2, 4, 128, seed=3, dtype=dtype)
    query[1, 0] = 0
    made = pipeline.score(query, projection, Cached(encoded.codes, encoded.gain), 2, Choice(0.1))
    found, expected = pipeline.quantized(made, 3), quantize_query(query, projection)
    apart = (found.values.int() - expected.values.int()).abs()
    assert apart.max() <= 1
    assert apart.sum() <= 4  # of 1,536
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [1, 4, 9])
def test_queries_too_small_to_invert(heads):
    """127 over the largest overflows: values go to the ends of their range, and zeros stay zeros."""
    projection = torch.eye(32, device=DEVICE).expand(2, 32, 32).clone()
    projection[:, 5:] = 0
    query = torch.full((1, 2, heads, 32), 1e-41, device=DEVICE)
    found = pipeline.quantize_query(query, projection)
    assert torch.equal(found.values, quantize_query(query, projection).values)
    assert found.values[..., :5].eq(127).all()
    assert found.values[..., 5:].eq(0).all()


@pytest.mark.emulated
def test_scores_and_their_histogram():
    """The lowest bin is left out: it counts tokens that do not rank, too, and no result depends on it."""
    projection, encoded = cache(2, 2, 1500, 64, 64, zero_keys=True)
    query = draw(2, 2, 4, 64, seed=3)
    cached, choice = Cached(encoded.codes, encoded.gain), Choice(0.1, recent=2, sink=1)
    made = pipeline.score(query, projection, cached, 50, choice)
    pipeline.rank(made, cached, choice)
    rounded = pipeline.quantized(made, 2)
    scores = hash_scores(rounded, encoded.codes, encoded.gain)
    plain = hash_scores(rounded, encoded.codes).mT.flatten(0, 1)
    assert torch.equal(made.heads[:, :1500].int(), plain)
    assert torch.equal(made.best.amax(1).unflatten(0, (2, 2)), scores.amax(-1))
    ranked = choosing.rank(scores, rounded.scale, group="relative", gain=True, scaling=0.1).flatten(0, 1)
    assert torch.equal(made.ranked[:, 1:1498], ranked[:, 1:1498])
    assert (made.ranked[:, [0, 1498, 1499]] == 2**31 - 1).all()
    low, shift = made.plan[:, PLAN_LOW.value, None], made.plan[:, PLAN_SHIFT.value, None]
    for row, digits in enumerate((ranked - low) >> shift):
        expected = torch.bincount(digits[1:1498], minlength=pipeline.COARSE)
        assert expected[1:].count_nonzero() > 3
        assert torch.equal(made.counts[row, 1 : pipeline.COARSE], expected[1:].int())


@pytest.mark.emulated
def test_attention_over_everything():
    query, keys, values = draw(2, 2, 4, 64), draw(2, 2, 150, 64, seed=1), draw(2, 2, 150, 64, seed=2)
    lengths = torch.tensor([150, 70], device=DEVICE)
    found = pipeline.dense_attention(query, keys, values, lengths)
    for row, length in enumerate(lengths.tolist()):
        everything = torch.arange(length, device=DEVICE).expand(2, -1)
        expected = sparse_attention(query[row], keys[row, :, :length], values[row, :, :length], everything)
        torch.testing.assert_close(found[row], expected, rtol=EXACT[torch.float32], atol=EXACT[torch.float32])


@pytest.mark.emulated
def test_the_papers_scores_by_popcount():
    projection, encoded = cache(2, 2, 1100, 64, 64)
    query = quantize_query(draw(2, 2, 4, 64, seed=3), projection)
    found = backend.popcount_scores(query.values, encoded.codes)
    assert torch.equal(found, hash_scores(query, encoded.codes, None).amax(-2))


def test_the_same_every_time():
    """Of a GPU: the interpreter runs programs one after the other."""
    projection, encoded = cache(1, 2, 1500, 64, 64)
    query, keys = draw(1, 2, 4, 64, seed=3), draw(1, 2, 1500, 64, seed=2)
    made = []
    for _ in range(3):
        indices = pipeline.choose(query, projection, Cached(encoded.codes, encoded.gain), 300, Choice(0.1))
        made.append((indices, pipeline.sparse_attention(query, keys, keys, indices)))
    assert all(torch.equal(one, other) for again in made[1:] for one, other in zip(made[0], again, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_step_in_a_cuda_graph():
    """Captured once, then replayed with other queries and other lengths."""
    projection, encoded = cache(1, 2, 2100, 64, 64)
    query, keys = draw(1, 2, 4, 64, seed=3), draw(1, 2, 2100, 64, seed=2)
    lengths = torch.tensor([2100], device=DEVICE)
    cached, choice = Cached(encoded.codes, encoded.gain, lengths=lengths), Choice(0.1, recent=1)

    def step():
        indices = backend.choose(query, projection, cached, 60, choice)
        return indices, backend.sparse_attention(query, keys, keys, indices, 0.1)

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
    slots = (keys.clone(), keys.clone(), encoded.codes, encoded.gain, None)
    new = (keys[:, :, :1], keys[:, :, 1:2], torch.tensor([7], device=DEVICE))
    arguments = (encoder.matrix, encoder.gram, None, None, *new, *slots)
    torch.library.opcheck(ops.append, arguments, test_utils=checks)
    torch.library.opcheck(ops.encode, (encoder.matrix, encoder.gram, None, None, keys), test_utils=checks)


def test_dense_attention_beyond_the_buffer():
    query, lengths = draw(1, 2, 4, 64, seed=3), torch.tensor([75], device=DEVICE)
    keys = draw(1, 2, 60, 64, seed=2)
    everything = torch.arange(60, device=DEVICE).expand(1, 2, -1)
    dense = pipeline.dense_attention(query, keys, keys, lengths)
    expected = sparse_attention(query, keys, keys, everything)
    torch.testing.assert_close(dense, expected, rtol=EXACT[torch.float32], atol=EXACT[torch.float32])
