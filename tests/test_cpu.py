"""What is numba's own: large caches, threads, instruction sets, and where compiled kernels are kept."""

import importlib
import os
import pkgutil
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from bpc_calib import BPCCache, InputError, enable, quantize_query
from bpc_calib.backends import cpu, dispatch
from bpc_calib.backends.cpu import attend, compiling, pipeline, score
from bpc_calib.backends.cpu import backend as kernels
from bpc_calib.backends.cpu.language import widen_row
from bpc_calib.backends.cpu.layout import ELEMENTS
from bpc_calib.compat import with_cache
from bpc_calib.method import encoded
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice, choose_quantized
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.stepping import Hashed
from bpc_calib.models.loading import load_model, load_tokenizer

CHOICE = Choice(scaling=0.1)


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


def both(query, projection, encoded, k, *, valid=None, lengths=None, **rules):
    """What the kernels choose, and what plain torch does from the same int8 queries."""
    cached, choice = Cached(encoded.codes, encoded.gain, valid, lengths), replace(CHOICE, **rules)
    found = pipeline.choose(query, projection, cached, k, choice)
    return found, choose_quantized(pipeline.quantize_query(query, projection), cached, k, choice)


def test_as_many_threads_as_torch_has_from_the_first_step_on():
    """numba's start sets torch's number, too."""
    lines = """
import torch
torch.set_num_threads(3)
import bpc_calib.backends.cpu.pipeline as pipeline
query, keys = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 9, 16)
for count in (3, 1):
    torch.set_num_threads(count)
    pipeline.sparse_attention(query, keys, keys, torch.zeros(1, 4, 1, dtype=torch.int64))
    import numba
    assert torch.get_num_threads() == count, torch.get_num_threads()
    assert numba.get_num_threads() == min(count, numba.config.NUMBA_NUM_THREADS), numba.get_num_threads()
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize(("tokens", "k"), [(20_000, 1), (20_000, 40), (20_000, 5_000), (20_000, 19_999), (5_001, 99)])
def test_where_a_sample_of_the_scores_misleads(tokens, k):
    """The best tokens all in the sample, or none of them; all of it padding; nearly all the same."""
    query, projection = draw(1, 1, 1, 64), draw(1, 64, 64, seed=1)
    asked = pipeline.quantize_query(query, projection).values[0, 0, 0]
    best = int(sum((1 << j) for j in range(63) if asked[j] >= 0) - ((asked[63] >= 0).item() << 63))
    sampled = torch.arange(0, tokens, int(score.sample_step(tokens)))
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
    for group in ("relative", "sum"):
        for k in (2, 8_999):
            found, expected = both(query, projection, encoded, k, group=group, scaling=1e-6)
            assert torch.equal(found, expected)


HALF = pytest.param(torch.float16, marks=pytest.mark.slow)  # numba compiles for half a minute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_in_int8(dtype):
    """Across a product that rounds in its own order: few entries differ, by one."""
    query, projection = draw(3, 2, 4, 128, dtype=dtype), draw(2, 64, 128, seed=1, dtype=dtype)
    query[1, 0] = 0
    found, expected = pipeline.quantize_query(query, projection), quantize_query(query, projection)
    apart = (found.values.int() - expected.values.int()).abs()
    assert apart.max() <= 1
    assert apart.sum() <= 4  # of 1,536
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-6, atol=0)


def test_exponentials():
    x = np.concatenate([np.linspace(-87, 0, 100_001), [-1000, -np.inf, -0.0]]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    attend.exponentials(x, np.float32(0))
    assert np.abs(x[:-3] / exact[:-3] - 1).max() < 3e-7
    assert (x[-3:-1] < 2e-38).all()
    assert x[-1] == 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_attention_in_parts_is_attention(threads, count):
    threads(count)
    query, keys, values = draw(1, 2, 4, 64), draw(1, 2, 900, 64, seed=1), draw(1, 2, 900, 64, seed=2)
    keys[:, :, 700] *= 50  # one part has all the weight
    indices = torch.arange(900).expand(1, 2, -1).clone()
    indices[0, 0, 100:600] = -1  # nothing in a part, and holes anywhere
    indices[0, 1, ::3] = -1
    found = pipeline.sparse_attention(query, keys, values, indices)
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
    with pytest.raises(InputError, match=r"^indices must be below the 50 tokens there are, and one is 50$"):
        dispatch.sparse_attention(query, keys, keys, indices)


def test_steps_in_several_threads_at_once():
    encoded, projection = large(2, 5_000), draw(2, 64, 64, seed=1)
    queries = [draw(1, 2, 4, 64, seed=seed) for seed in range(4)]
    cached = Cached(encoded.codes, encoded.gain)
    expected = [pipeline.choose(query, projection, cached, 99, CHOICE) for query in queries]
    wrong = []

    def work(i):
        for _ in range(20):
            found = pipeline.choose(queries[i], projection, cached, 99, CHOICE)
            if not torch.equal(found, expected[i]):
                wrong.append(i)

    running = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert not wrong


def test_no_two_functions_of_a_kernel_share_a_name():
    """Where processes kept kernels apart, one that loads both takes the first function of a name for all."""
    modules = [importlib.import_module(f"{cpu.__name__}.{each.name}") for each in pkgutil.iter_modules(cpu.__path__)]
    compiled = {id(each): each.py_func for module in modules for each in vars(module).values() if is_compiled(each)}
    names = [(each.__module__, each.__qualname__) for each in compiled.values()]
    assert len(set(names)) == len(names)
    rankers = [each for each in compiled.values() if each.__code__ is score.relative.py_func.__code__]
    assert len(rankers) == 8  # three ways to group and one for four heads, each with the gain and without
    assert all(getattr(score, each.__name__).py_func is each for each in rankers)


def is_compiled(each):
    return hasattr(each, "py_func")


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
    for backend in ("torch", "numba"):
        monkeypatch.setenv("BPC_BACKEND", backend)
        cache = BPCCache(model.config, artifact, dense_layers=())
        written[backend] = model.generate(
            ids, **with_cache(cache), max_new_tokens=256, min_new_tokens=256, do_sample=False
        )[0, 2000:]
    assert len(written["torch"]) == 256
    assert torch.equal(written["torch"], written["numba"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF])
def test_logits_of_a_random_model(monkeypatch, dtype):
    layers = 3 if dtype == torch.float32 else 1  # what one layer rounds, the next may choose by
    model = tiny.model(max_position_embeddings=1024, head_dim=64, num_hidden_layers=layers).to(dtype)
    enable(model)
    ids = torch.randint(250, (2, 600), generator=torch.Generator().manual_seed(0))
    logits = {}
    for backend in ("torch", "numba"):
        monkeypatch.setenv("BPC_BACKEND", backend)
        cache = BPCCache(model.config, tiny.artifact(model.config), budget=0.1, min_tokens=1, dense_layers=())
        with torch.inference_mode():
            model(ids, **with_cache(cache))
            logits[backend] = model(ids[:, :1], **with_cache(cache)).logits.float()
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(logits["numba"], logits["torch"], rtol=tolerance, atol=tolerance)


INSTRUCTIONS = """
import sys, torch
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
import test_cpu
from bpc_calib.backends.cpu.dots import LANES
assert LANES == int(sys.argv[2]), LANES
for bits in (32, 64, 128):
    for heads in (1, 4, 5):
        query, projection = test_cpu.draw(1, 2, heads, 64), test_cpu.draw(2, bits, 64, seed=1)
        encoded = test_cpu.large(2, 5_003, -(-bits // 64))
        if bits == 32:
            encoded.codes[:] &= (1 << 32) - 1
        for kept in (encoded, replace(encoded, gain=None)):
            for group in ("relative", "max", "sum"):
                found, expected = test_cpu.both(query, projection, kept, 99, group=group)
                assert torch.equal(found, expected), (bits, heads, group, kept.gain is None)
"""


@pytest.mark.parametrize(
    ("lanes", "features"),
    [
        (0, ""),  # what no test runs on a machine with the others
        pytest.param(8, "+avx2,+fma,+avxvnni", marks=pytest.mark.slow),
        pytest.param(16, None, marks=pytest.mark.slow),
    ],
    ids=["by tables", "256 bits", "512 bits"],
)
def test_every_instruction_set(tmp_path, lanes, features):
    """The scores are the same integers, whatever multiplies bytes."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    if lanes:
        from llvmlite.binding import get_host_cpu_features

        has = get_host_cpu_features()
        if not (has.get("avxvnni") if lanes == 8 else has.get("avx512vnni") and has.get("avx512bw")):
            pytest.skip("this machine has no such instructions")
    if features is not None:
        environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", INSTRUCTIONS, str(Path(__file__).parent), str(lanes)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_kernels_are_kept_where_nobody_else_can_write(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = compiling.kernel_folder()
    assert found.parent == tmp_path / "bpc" / "bpc-numba"
    assert stat.S_IMODE(found.stat().st_mode) == stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    found.parent.chmod(0o770)
    assert compiling.kernel_folder() is None
    found.parent.chmod(0o700)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "bpc").mkdir()
    (tmp_path / "other" / "bpc" / "bpc-numba").symlink_to(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert compiling.kernel_folder() is None
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    assert compiling.kernel_folder().parent == tmp_path / "named" / "bpc-numba"


def test_a_constant_of_the_method_makes_kernels_stale(tmp_path, monkeypatch):
    before, source = compiling.stamp(), Path(encoded.__file__).read_text()
    changed = tmp_path / "encoded.py"
    changed.write_text(source)
    monkeypatch.setattr(encoded, "__file__", str(changed))
    assert compiling.stamp() == before
    changed.write_text(source.replace("GAIN_OFFSET = 32", "GAIN_OFFSET = 33"))
    assert compiling.stamp() != before


READY = """
import logging, sys, numba, torch
from bpc_calib.backends.cpu import pipeline
from bpc_calib.backends.cpu.ready import make_ready
logging.basicConfig(format="%(message)s")
for name in sys.argv[1:]:
    numba.njit(lambda x: x)(1)  # what is compiled next has another number than in the other processes
    make_ready(getattr(torch, name), "choose", "attend")
print(sum(sum(k.stats.cache_hits.values()) for k in (pipeline.choose_kernel, pipeline.attend_kernel)))
"""
LOADED = """
import sys, torch
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
import test_cpu
from bpc_calib.backends.cpu.ready import make_ready
make_ready(torch.bfloat16, "choose", "attend")
make_ready(torch.float32, "choose", "attend")
projection, encoded = test_cpu.draw(2, 64, 64, seed=1), test_cpu.large(2, 5_003)
for heads in (4, 5):
    for kept in (encoded, replace(encoded, gain=None)):
        for group in ("relative", "max", "sum"):
            found, expected = test_cpu.both(test_cpu.draw(1, 2, heads, 64), projection, kept, 99, group=group)
            assert torch.equal(found, expected), (heads, group, kept.gain is None)
"""


@pytest.mark.slow
def test_kernels_of_several_processes(tmp_path):
    """Compiling is told and done once; what processes compiled apart works together in one that loads it."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run(code, *words):
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    for words, loaded in ((["float32"], 1), (["float32", "bfloat16"], 3)):  # a process beside this one attends
        done = run(READY, *words)
        said = done.stderr.splitlines()
        name = words[-1]
        assert said[0] == f"compiling kernels for {name} on the CPU, half a minute to two, once on this machine"
        assert said[1].startswith("compiled in ")
        assert done.stdout == f"{loaded}\n"
    again = run(READY, "bfloat16", "float32")
    assert (again.stdout, again.stderr) == ("3\n", "")
    loaded = run(LOADED, str(Path(__file__).parent))
    assert loaded.returncode == 0, loaded.stderr


def test_the_default_dtype_changes_nothing():
    """A program may set it, as vLLM does while it loads a model; the kernels write float32."""
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(1, 2, 4, 64, generator=generator), torch.randn(1, 2, 90, 64, generator=generator)
    projection, choice = torch.randn(2, 64, 64, generator=generator) / 8, Choice(scaling=0.125)
    encoder = make_encoder(projection, torch.float32)

    def everything():
        encoded = kernels.encode_with(encoder, keys)
        cached = Cached(encoded.codes, encoded.gain)
        chosen = kernels.choose(query, projection, cached, 9, choice)
        slots = Slots(keys.clone(), keys.clone(), encoded.codes, encoded.gain, encoded.error)
        out = kernels.step(query, Hashed(projection, encoder, slots, 90), 9, choice)
        scale = kernels.quantize_query(query, projection).scale
        return encoded.error, chosen, kernels.sparse_attention(query, keys, keys, chosen), out, scale

    expected = everything()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_widened(dtype):
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    found = np.empty(1 << 16, np.float32)
    widen_row(numbers.data_ptr(), ELEMENTS[dtype], found)
    assert torch.equal(torch.from_numpy(found).nan_to_num(7.0), numbers.float().nan_to_num(7.0))
