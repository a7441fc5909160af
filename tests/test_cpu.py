"""What is the CPU kernels' own: large caches, threads, instruction sets, and exponentials."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from bpc_calib import BPCCache, InputError, enable, quantize_query
from bpc_calib.backends.cpu import backend as kernels
from bpc_calib.backends.cpu import native
from bpc_calib.compat import with_cache
from bpc_calib.method import step
from bpc_calib.method import step as plain_step
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.nibbles import encode_nibbles, pack_nibbles
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import State, alike
from bpc_calib.models.loading import load_model, load_tokenizer

RULES = Rules(scaling=0.1)
SAMPLE = 1024  # scores that a threshold is guessed from, as in native/score.h
ISAS = ["base", "avx2", "avx512", "zen4", "amx"]


@pytest.fixture
def threads():
    """Set the number of torch's threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def large(rows, tokens, words=1):
    """Codes and gains by chance: only their number matters here."""
    generator = torch.Generator().manual_seed(tokens)
    codes = torch.randint(-(1 << 62), 1 << 62, (1, rows, tokens, words), generator=generator)
    gain = torch.randint(0, 256, (1, rows, tokens), generator=generator).to(torch.uint8)
    return Encoded(codes, torch.zeros(1, rows, tokens), gain)


def ranking(query, projection, encoded, k, nibbles=False):
    """What ranking reads, which is no key."""
    state = State(query, query, encoded.codes, encoded.gain)
    codebook = make_codebook(projection, query.dtype, nibbles=nibbles)
    return query, codebook, state, alike(encoded.error.unsqueeze(-1), k)


def both(query, projection, encoded, k, *, valid=None, lengths=None, nibbles=False, **rules):
    """What the kernels choose, and what plain torch does from the same tables."""
    query, codebook, state, rows = ranking(query, projection, encoded, k, nibbles)
    rows = replace(rows, valid=valid, lengths=rows.lengths if lengths is None else lengths)
    rules = replace(RULES, **rules)
    found, asked = kernels.rank(query, codebook, state, rows, rules)
    return found, step.best(asked, state, rows, rules, query.shape[-1])


def rounded(query, projection, nibbles=False):
    """The tables of the kernels."""
    few = large(len(projection), 8, -(-projection.shape[-2] // (256 if nibbles else 64)))
    return kernels.rank(*ranking(query, projection, few, 1, nibbles), RULES, stages=native.PROJECT)[1]


def attend(query, keys, values, indices, scaling=None):
    return kernels.attend(query, State(keys, values), alike(keys, indices.shape[-1]), indices, scaling)


@pytest.mark.parametrize("count", [1, 2, 3, 16])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 20_011), (3, 9_001), (8, 5_000)])
def test_any_number_of_threads_chooses_the_same(threads, rows, tokens, count):
    """Rows apart, and a row in parts."""
    threads(count)
    projection = draw(rows, 64, 64, seed=1)
    lengths = torch.tensor([tokens - 77])
    valid = torch.rand(1, tokens, generator=torch.Generator().manual_seed(3)) > 0.2
    for rules in ({}, {"group": "max", "recent": 3, "sink": 5}, {"lengths": lengths, "valid": valid}):
        found, expected = both(draw(1, rows, 5, 64), projection, large(rows, tokens), 123, **rules)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("real", [(0, 900), (8_000, 9_001), (7_000, 7_100), (1_023, 1_025)])
def test_long_padding_is_not_scored_and_changes_nothing(threads, real, count):
    """Before the tokens and behind them, in whole blocks and in parts of some."""
    threads(count)
    projection, encoded = draw(3, 64, 64, seed=1), large(3, 9_001)
    valid = torch.zeros(1, 9_001, dtype=torch.bool)
    valid[:, slice(*real)] = True
    chosen = []
    for rules in ({}, {"group": "max", "recent": 2, "sink": 1}):
        for codes in (encoded.codes, encoded.codes.where(valid.unsqueeze(-1), 0)):
            found, expected = both(
                draw(1, 3, 5, 64), projection, replace(encoded, codes=codes), 2, valid=valid, **rules
            )
            assert torch.equal(found, expected)
            chosen.append(found)
        assert torch.equal(*chosen[-2:])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_step_in_any_number_of_threads(threads, count):
    """Large enough for several: the same codes and tokens as each stage alone."""
    length, projection, encoded = 20_000, draw(2, 64, 64, seed=1) / 8, large(2, 20_010)
    query, keys = draw(1, 2, 4, 64), draw(1, 2, 20_010, 64, seed=2)
    codebook = make_codebook(projection, torch.float32)
    state = State(keys, keys, encoded.codes, encoded.gain, encoded.error)
    newest = kernels.encode_with(codebook, keys[:, :, length - 1 : length])
    threads(count)
    out, chosen = kernels.sparse_decode(query, codebook, state, alike(keys[:, :, :length], 400), RULES, fresh=1)
    for name in ("codes", "gain", "error"):
        assert torch.equal(getattr(state, name)[:, :, length - 1 : length], getattr(newest, name))
    in_use = Encoded(*(each[:, :, :length] for each in (encoded.codes, encoded.error, encoded.gain)))
    assert torch.equal(chosen, both(query, projection, in_use, 400)[1])
    torch.testing.assert_close(out, attend(query, keys, keys, chosen, 0.1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "k"), [(20_000, 1), (20_000, 40), (20_000, 5_000), (20_000, 19_999), (5_001, 99)])
def test_where_a_sample_of_the_scores_misleads(tokens, k):
    """The best tokens all in the sample, or none of them; all of it padding; nearly all the same."""
    query, projection = draw(1, 1, 1, 64), draw(1, 64, 64, seed=1)
    best = int(pack_nibbles(rounded(query, projection).tables[0, 0].argmax(-1))[0, 0])
    sampled = torch.arange(0, tokens - 1, max(16, -(-tokens // SAMPLE)))
    for place in (sampled, sampled + 1, torch.arange(7)):
        encoded = large(1, tokens)
        encoded.codes[0, 0, place, 0] = best
        found, expected = both(query, projection, encoded, k)
        assert torch.equal(found, expected)
        valid = torch.ones(1, tokens, dtype=torch.bool)
        valid[:, place] = False
        if k <= valid.sum():
            found, expected = both(query, projection, encoded, k, valid=valid)
            assert torch.equal(found, expected)
        encoded.codes[:] = ~best
        encoded.codes[0, 0, place, 0] = best
        found, expected = both(query, projection, encoded, k)
        assert torch.equal(found, expected)


def test_scores_from_one_end_of_the_integers_to_the_other():
    """Ranks that need all their digits: two tokens far from all others."""
    encoded = large(1, 9_000)
    query, projection = draw(1, 1, 16, 64), 1e-3 * draw(1, 64, 64, seed=1)
    for group in ("relative", "max"):
        for k in (2, 8_999):
            found, expected = both(query, projection, encoded, k, group=group, scaling=1e-6)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("nibbles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tables_of_queries(dtype, nibbles):
    """Across a product that rounds in its own order: few rounded products differ, by one."""
    query, projection = draw(3, 2, 4, 128, dtype=dtype), draw(2, 256 if nibbles else 64, 128, seed=1, dtype=dtype)
    query[1, 0] = 0
    found, expected = rounded(query, projection, nibbles), quantize_query(query, projection, nibbles=nibbles)
    apart = (found.tables.int() - expected.tables.int()).abs()
    assert apart.max() <= 1
    assert apart.count_nonzero() <= 4 * (1 if nibbles else 16)  # a rounded product of signs is in 16 entries
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_the_search_for_nibbles_is_that_of_plain_torch(bits, tokens):
    check_search(bits, tokens)


def check_search(bits, tokens):
    """From the same products, bit for bit; with ties, zero keys, and vectors that all are equal."""
    scores, gram = draw(2, 3, tokens, 4 * bits), 0.3 * draw(3, 4 * bits, 4 * bits, seed=1)
    norm = 50 * draw(2, 3, tokens, seed=2).abs()
    scores[0, 0, 0], norm[0, 0, 0] = 0, 0
    scores[:, 1], gram[1] = scores[:, 1].round(), gram[1].round()
    scores[1, 2], gram[2] = 1, 1
    found, expected = kernels.encode_nibbles(scores, gram, norm), encode_nibbles(scores, gram, norm)
    for name in ("codes", "error", "gain"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bits", [32, 64, 128])
def test_few_keys_and_many_have_the_same_nibbles(bits, count, threads):
    """Of small integers, so that products are exact: a kernel of its own hashes few keys."""
    threads(count)
    vectors, keys = draw(3, 4 * bits, 40, seed=1).round(), (2 * draw(2, 3, 600, 40)).round()
    keys[:, :, 1] = 0
    codebook = make_codebook(vectors, torch.float32, nibbles=True)
    expected = encode_with(codebook, keys)
    for some in (slice(0, 600), slice(0, 3), slice(599, 600)):
        found = kernels.encode_with(codebook, keys[:, :, some])
        for name in ("codes", "error", "gain"):
            assert torch.equal(getattr(found, name), getattr(expected, name)[:, :, some]), name


def test_exponentials():
    """The weight of a token with a logit of x below another's: e^x / (1 + e^x)."""
    logits = torch.linspace(-80, 0, 20_001)
    keys = torch.zeros(1, len(logits), 2, 8)
    keys[0, :, 1, 0] = logits
    values = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand_as(keys).contiguous()
    query = torch.zeros(1, len(logits), 1, 8)
    query[..., 0] = 1
    listed = torch.arange(2).expand(1, len(logits), 2)
    found = attend(query, keys, values, listed, 1.0)[0, :, 0, 0].double()
    exact = logits.double().sigmoid()
    assert (found / exact - 1).abs().max() < 5e-7


@pytest.mark.parametrize("count", [1, 2, 5])
def test_attention_in_parts_is_attention(threads, count):
    threads(count)
    query, keys, values = draw(1, 2, 4, 64), draw(1, 2, 900, 64, seed=1), draw(1, 2, 900, 64, seed=2)
    keys[:, :, 700] *= 50  # one part has all the weight
    indices = torch.arange(900).expand(1, 2, -1).clone()
    indices[0, 0, 100:600] = -1  # nothing in a part, and holes anywhere
    indices[0, 1, ::3] = -1
    found = attend(query, keys, values, indices)
    torch.testing.assert_close(found, plain(query, keys, values, indices), rtol=1e-5, atol=1e-5)


def plain(query, keys, values, indices):
    """Softmax attention written out, in float64."""
    logits = query.double() @ keys.double().mT / keys.shape[-1] ** 0.5
    listed = torch.zeros(*indices.shape[:2], keys.shape[2] + 1, dtype=torch.bool)
    listed.scatter_(2, torch.where(indices < 0, keys.shape[2], indices), True)
    weights = logits.masked_fill(~listed[:, :, None, :-1], -torch.inf).softmax(-1)
    return (weights @ values.double()).float()


def test_an_index_beyond_the_tokens_is_refused():
    query, keys = draw(1, 2, 4, 64), draw(1, 2, 50, 64)
    indices = torch.tensor([[[0, 1], [2, 50]]])
    with pytest.raises(IndexError, match=r"^a token is beyond the 50 there are: 50$"):
        attend(query, keys, keys, indices)


@pytest.mark.parametrize("nibbles", [False, True])
@pytest.mark.parametrize(("slots", "batch"), [([50], 1), ([3, 100_000], 1), ([-1], 2), ([50], 2)])
def test_a_slot_that_is_not_there_is_refused(slots, batch, nibbles):
    """Codes alone are written by a kernel, which would write beyond its buffers."""
    keys, codes = draw(batch, 2, 50, 64), torch.zeros(batch, 2, 50, 1, dtype=torch.int64)
    state, new = State(keys, keys, codes), draw(batch, 2, len(slots), 64, seed=1)
    codebook = make_codebook(draw(2, 256 if nibbles else 64, 64) / 8, torch.float32, nibbles=nibbles)
    with pytest.raises(IndexError, match="are not all within the room"):
        kernels.append(state, codebook, new, None, torch.tensor(slots))
    assert not codes.any()
    with pytest.raises((IndexError, RuntimeError)):
        step.append(state, codebook, new, None, torch.tensor(slots))


@pytest.mark.parametrize("module", [kernels, step])
@pytest.mark.parametrize("listed", [torch.arange(8).expand(1, 2, -1), torch.arange(8.0).expand(2, 2, -1)])
def test_lists_that_do_not_fit_are_refused(module, listed):
    """One list for two sequences would name tokens of the first."""
    query, keys = draw(2, 2, 4, 64), draw(2, 2, 50, 64, seed=1)
    with pytest.raises(InputError, match=r"indices must be int64 \[2, 2, k\]"):
        module.attend(query, State(keys, keys), alike(keys, 8), listed)


@pytest.mark.parametrize("what", ["dtype", "batch", "length"])
def test_attention_refuses_what_does_not_fit(what):
    query, keys, rows = draw(2, 2, 4, 64), draw(2, 2, 50, 64, seed=1), None
    if what == "dtype":
        keys = keys.bfloat16()
    elif what == "batch":
        keys, rows = keys[:1], alike(keys, 8)
    else:
        rows = replace(alike(keys, 8), longest=5_000)
    with pytest.raises(InputError, match="not fit"):
        kernels.attend(query, State(keys, keys), rows or alike(keys, 8), torch.arange(8).expand(2, 2, -1))


@pytest.mark.parametrize("of", ["key", "value"])
def test_what_is_no_number_stays_none(of):
    """A broken model must not look healthy."""
    query, keys, values = draw(1, 2, 4, 64), draw(1, 2, 60, 64, seed=1), draw(1, 2, 60, 64, seed=2)
    (keys if of == "key" else values)[0, 1, 7, 3] = float("nan")
    state, rows = State(keys, values), alike(keys, 60)
    every = torch.arange(60).expand(1, 2, -1)
    for found in (kernels.dense_decode(query, state, rows), kernels.attend(query, state, rows, every)):
        expected = step.attend(query, state, rows, every)
        assert torch.equal(found.isnan(), expected.isnan())
        assert found[:, 1].isnan().any()
        assert not found[:, 0].isnan().any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_of_a_fork_amid_a_step_can_step():
    """It would wait for ever for a step of a thread that it does not have."""
    script = """
import os, threading, warnings
import torch
from bpc_calib.backends.cpu import backend as kernels
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import State, alike
warnings.simplefilter("ignore")
torch.set_num_threads(1)
keys = torch.randn(1, 2, 1, 64).expand(1, 2, 200_000, 64)
codes = torch.randint(-(1 << 62), 1 << 62, (1, 2, 200_000, 1))
query, codebook, rows = torch.randn(1, 2, 4, 64), make_codebook(torch.randn(2, 64, 64), torch.float32), alike(keys, 500)
def step():
    kernels.rank(query, codebook, State(keys, keys, codes), rows, Rules(gain=False))
over = threading.Event()
def steps():
    while not over.is_set():
        step()
thread = threading.Thread(target=steps)
thread.start()
for _ in range(12):
    if not (child := os.fork()):
        step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
over.set()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_instructions_that_do_not_exist_are_refused():
    """Any other word used to stand for AVX2."""
    done = subprocess.run(
        [sys.executable, "-c", "import bpc_calib.backends.cpu.native"],
        env=os.environ | {"BPC_ISA": "AVX512"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = "InputError: the environment variable BPC_ISA must be one of amx, zen4, avx512, avx2, base, not 'AVX512'"
    assert said in done.stderr


def test_steps_in_several_threads_at_once():
    queries = [draw(1, 2, 4, 64, seed=seed) for seed in range(4)]
    _, *given = ranking(queries[0], draw(2, 64, 64, seed=1), large(2, 5_000), 99)
    expected = [kernels.rank(query, *given, RULES)[0] for query in queries]
    wrong = []

    def work(i):
        for _ in range(20):
            found, _ = kernels.rank(queries[i], *given, RULES)
            if not torch.equal(found, expected[i]):
                wrong.append(i)

    running = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert not wrong


@pytest.mark.slow  # plain torch needs seconds
def test_both_backends_write_the_same_256_tokens(monkeypatch):
    """Greedily, behind 2,000 tokens of text, every layer choosing 2 % of them; in float32.

    In bfloat16 the two round attention differently, as SDPA and eager attention do, and part where two tokens are
    equally likely.
    """
    model, tokenizer = load_model("demo").float(), load_tokenizer("demo")
    artifact = tiny.calibrated(model, tokenizer, corpora=["demo"], samples=12, sequence_length=1024)
    enable(model)
    ids = tokenizer(tiny.prose(2500), return_tensors="pt")["input_ids"][:, :2000]
    written = {}
    for backend in ("torch", "native"):
        monkeypatch.setenv("BPC_BACKEND", backend)
        cache = BPCCache(model.config, artifact, dense_layers=())
        written[backend] = model.generate(
            ids, **with_cache(cache), max_new_tokens=256, min_new_tokens=256, do_sample=False
        )[0, 2000:]
    assert len(written["torch"]) == 256
    assert torch.equal(written["torch"], written["native"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_a_random_model(monkeypatch, dtype):
    layers = 3 if dtype == torch.float32 else 1  # what one layer rounds, the next may choose by
    model = tiny.model(max_position_embeddings=1024, head_dim=64, num_hidden_layers=layers).to(dtype)
    enable(model)
    ids = torch.randint(250, (2, 600), generator=torch.Generator().manual_seed(0))
    logits = {}
    for backend in ("torch", "native"):
        monkeypatch.setenv("BPC_BACKEND", backend)
        cache = BPCCache(model.config, tiny.artifact(model.config), budget=0.1, min_tokens=1, dense_layers=())
        with torch.inference_mode():
            model(ids, **with_cache(cache))
            logits[backend] = model(ids[:, :1], **with_cache(cache)).logits.float()
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(logits["native"], logits["torch"], rtol=tolerance, atol=tolerance)


INSTRUCTIONS = """
import sys, torch
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
import test_cpu, test_few_tokens
from bpc_calib.backends.cpu import native
assert native.isa() == sys.argv[2], native.isa()
for bits in (32, 64, 128):
    for heads, nibbles in ((1, False), (2, False), (3, False), (3, True), (4, False), (4, True), (9, False)):
        rows = 4 * bits if nibbles else bits
        query, projection = test_cpu.draw(1, 2, heads, 64), test_cpu.draw(2, rows, 64, seed=1)
        encoded = test_cpu.large(2, 5_003, -(-bits // 64))
        if bits == 32:
            encoded.codes[:] &= (1 << 32) - 1
        for kept in (encoded, replace(encoded, gain=None)):
            for group, valid in (("relative", None), ("max", None), ("relative", test_cpu.draw(1, 5_003, seed=2) > 0)):
                found, expected = test_cpu.both(query, projection, kept, 99, group=group, nibbles=nibbles, valid=valid)
                assert torch.equal(found, expected), (bits, heads, group, kept.gain is None, valid is None)
    test_cpu.check_search(bits, 37)
test_cpu.check_widening()
for dtype in test_few_tokens.DTYPES:
    test_few_tokens.check(dtype, range(1, 18), 7, 96)
test_cpu.test_exponentials()
test_cpu.test_many_tokens_attended_by_several_threads()
"""


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    """The scores are the same integers, however many heads and keys look them up at once."""
    if isa not in (*ISAS[: min(ISAS.index(native.isa()), ISAS.index("zen4"))], native.isa()):
        pytest.skip("this machine has no such instructions")
    done = subprocess.run(
        [sys.executable, "-c", INSTRUCTIONS, str(Path(__file__).parent), isa],
        env=os.environ | {"BPC_ISA": isa}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_default_dtype_changes_nothing():
    """A program may set it, as vLLM does while it loads a model; the kernels write float32."""
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(1, 2, 4, 64, generator=generator), torch.randn(1, 2, 90, 64, generator=generator)
    codebook = make_codebook(torch.randn(2, 64, 64, generator=generator) / 8, torch.float32)

    def everything():
        encoded, rows = kernels.encode_with(codebook, keys), alike(keys, 9)
        state = State(keys.clone(), keys.clone(), encoded.codes, encoded.gain, encoded.error)
        step = kernels.sparse_decode(query, codebook, state, rows, RULES, fresh=1)
        chosen, rounded = kernels.rank(query, codebook, state, rows, RULES)
        dense = kernels.dense_decode(query, state, rows)
        return encoded.error, *step, chosen, rounded.scale, attend(query, keys, keys, chosen), dense

    expected = everything()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_many_tokens_attended_by_several_threads():
    """Parts of a row are put together; 16-bit numbers are widened; queries as far apart as they may be."""
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for dtype, tokens, heads, dim, padded in (
            (torch.float32, 5_003, 3, 64, False), (torch.bfloat16, 4_096, 3, 64, False),
            (torch.float16, 1_030, 3, 64, False), (torch.bfloat16, 5_003, 7, 90, False),
            (torch.float16, 5_003, 3, 64, False),
            (torch.bfloat16, 5_003, 7, 90, True), (torch.float32, 1_030, 7, 90, True),
        ):  # fmt: skip
            query = 4 * torch.randn(1, 2, heads * 5, dim, generator=generator)
            keys, values = torch.randn(2, 1, 2, tokens + 9, dim, generator=generator)
            state = State(keys.to(dtype), values.to(dtype))
            valid = torch.rand(1, tokens + 9, generator=generator) > 0.3 if padded else None
            rows = replace(alike(keys[:, :, :tokens], 1), valid=valid)
            found = kernels.dense_decode(query.to(dtype), state, rows, new=5)
            exact = State(state.keys.double(), state.values.double())
            expected = plain_step.dense_decode(query.to(dtype).double(), exact, rows, new=5)
            assert found.dtype == dtype
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(found.double(), expected, rtol=2 * unit, atol=max(unit / 2, 1e-5))
    finally:
        torch.set_num_threads(threads)


def test_every_number_of_16_bits_widened():
    check_widening()


def check_widening():
    """Attention to one token is its value, whatever finite number that is."""
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        values = numbers.where(numbers.isfinite(), 1).view(1, 256, 1, 256)
        query = torch.zeros_like(values)
        found = attend(query, query, values, torch.zeros(1, 256, 1, dtype=torch.int64))
        assert torch.equal(found, values)
    check_rounding()


def check_rounding():
    """Attention to two tokens with the same key is their mean, rounded as torch does."""
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        numbers = numbers.where(numbers.isfinite(), 1)
        for apart in (1, 2, 3, 0x4FF):
            values = torch.stack([numbers, numbers.roll(apart)], 1).view(1, 256, 256, 2).transpose(2, 3).contiguous()
            query, both = torch.zeros_like(values), torch.tensor([0, 1]).expand(1, 256, 2)
            found = attend(query[:, :, :1], query, values, both)
            assert torch.equal(found, (values.float().sum(2, keepdim=True) / 2).to(dtype))
