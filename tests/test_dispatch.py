"""Which backend serves, and what is said when one cannot."""

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny
import torch
from drawn import DEVICE, draw

from bpc_calib import InputError, enable
from bpc_calib.backends import dispatch, plain
from bpc_calib.method import step
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State

CPU = torch.device("cpu")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")
COMPILED_HERE = ["native"] if DEVICE.type == "cpu" else []


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("BPC_BACKEND", raising=False)
    for cached in (dispatch._warn_once, dispatch._without_triton, dispatch._without_library):
        cached.cache_clear()
    yield
    for cached in (dispatch._warn_once, dispatch._without_triton, dispatch._without_library):
        cached.cache_clear()


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, "bpc_calib.backends.dispatch")
    return lambda: [record.getMessage() for record in caplog.records]


def test_native_serves_the_cpu_and_triton_the_gpu(monkeypatch):
    assert dispatch.backend(CPU) == "native"
    assert dispatch.backend(torch.device("cuda")) == "triton"
    assert dispatch.backend(torch.device("mps")) == "torch"
    monkeypatch.setenv("BPC_BACKEND", "torch")
    assert dispatch.backend(torch.device("cuda")) == dispatch.backend(CPU) == "torch"
    monkeypatch.setenv("BPC_BACKEND", "")
    assert dispatch.backend(CPU) == "native"
    monkeypatch.setenv("BPC_BACKEND", "native")
    with pytest.raises(InputError, match="needs tensors on the CPU, and they are on cuda"):
        dispatch.backend(torch.device("cuda"))


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", "cuda")
    with pytest.raises(InputError, match=r"^BPC_BACKEND must be one of torch, triton, native, not 'cuda'$"):
        dispatch.backend(CPU)


def test_without_triton_a_gpu_falls_back_with_one_warning(monkeypatch, warned):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert dispatch.backend(torch.device("cuda")) == "torch"
    assert dispatch.backend(torch.device("cuda")) == "torch"
    assert warned() == ["Triton is not installed (pip install triton); plain torch decodes instead, slowly"]
    monkeypatch.setenv("BPC_BACKEND", "triton")
    with pytest.raises(InputError, match="Triton is not installed"):
        dispatch.backend(torch.device("cuda"))


def test_an_old_triton_is_not_taken(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.4.0")
    assert dispatch.backend(torch.device("cuda")) == "torch"
    monkeypatch.setenv("BPC_BACKEND", "triton")
    with pytest.raises(InputError, match=r"Triton 3\.4\.0 is older than 3\.6"):
        dispatch.backend(CPU)


@interpreted
def test_compiled_kernels_need_a_gpu(monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", "triton")
    assert dispatch.backend(CPU) == "triton"  # by the interpreter
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="needs a GPU, and the tensors are on cpu"):
        dispatch.backend(CPU)


@interpreted
def test_a_gpu_too_old_falls_back(monkeypatch, warned):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert dispatch.backend(torch.device("cuda")) == "torch"
    assert warned() == [
        "the kernels need a GPU of compute capability 8.0, and this one has 7.5; plain torch decodes instead, slowly"
    ]


def test_the_package_imports_no_compiler():
    named = "'triton', 'bpc_calib.backends.cpu.native', 'torch._dynamo'"
    code = f"import sys, bpc_calib; assert not {{{named}}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_enable_refuses_an_unknown_backend(monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", "fast")
    with pytest.raises(InputError, match="BPC_BACKEND must be one of"):
        enable(tiny.model())


@pytest.fixture
def no_kernels(monkeypatch):
    """Where a kernel is launched all the same, the test fails."""
    import bpc_calib.backends.triton.ops  # noqa: F401

    monkeypatch.setenv("BPC_BACKEND", "triton")
    for name in ("sparse_decode", "attend", "encode_with"):
        monkeypatch.setattr(f"bpc_calib.backends.triton.pipeline.{name}", None)


def case(heads=4, dtype=torch.float32, batch=1, tokens=60):
    """The arguments of a step that attends to 9 tokens."""
    codebook = make_codebook(draw(2, 64, 64, seed=1) / 16, dtype)
    keys = draw(batch, 2, tokens, 64, seed=2, dtype=dtype)
    encoded = encode_with(codebook, keys)
    lengths = torch.full((batch,), tokens, device=DEVICE)
    rows = Rows(lengths, torch.full((batch, 1), 9, device=DEVICE), tokens, 9)
    state = State(keys, keys, encoded.codes, encoded.gain)
    return draw(batch, 2, heads, 64, seed=3, dtype=dtype), codebook, state, rows, Rules(scaling=0.1, recent=1)


def decode(query, codebook, state, rows, rules):
    return dispatch.find(query, state).sparse_decode(query, codebook, state, rows, rules)


@pytest.mark.usefixtures("no_kernels")
def test_what_the_kernels_do_not_serve_falls_back(warned):
    given = case(heads=17)
    for _ in range(2):
        found = decode(*given)
    assert all(map(torch.equal, found, step.sparse_decode(*given)))
    decode(*case(heads=17, tokens=17))  # as many tokens as heads are no other case
    assert warned() == [
        "the triton kernels do not serve 17 query heads per KV head, more than 16; plain torch does, slowly"
    ]


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda keys: torch.zeros(1, 2, 60, 320, device=DEVICE), "head_dim 320, above 256"),
        (lambda keys: keys[:, :1, :1].expand(1, 70000, 1, 64), "70000 KV heads of all sequences, more than 65535"),
        (lambda keys: keys.int(), "dtype torch.int32"),
    ],
    ids=["head_dim", "rows", "dtype"],
)
def test_keys_that_the_kernels_do_not_take(warned, change, said):
    keys = change(draw(1, 2, 60, 64, seed=2))
    assert dispatch.find(keys) is plain
    assert len(warned()) == 1
    assert said in warned()[0]


@pytest.mark.parametrize("backend", COMPILED_HERE)
def test_states_that_the_kernels_do_not_take(monkeypatch, warned, backend):
    monkeypatch.setenv("BPC_BACKEND", backend)
    query, codebook, state, rows, rules = case()
    wide = torch.stack([state.codes, state.codes], dim=3).flatten(3)[..., :1]  # a gap behind every code
    apart = replace(state, codes=wide)
    assert dispatch.find(query, apart) is plain
    found, expected = (decode(query, codebook, each, rows, rules) for each in (apart, state))
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])
    spread = torch.stack([state.gain, state.gain], dim=3)[..., 0]
    assert dispatch.find(query, replace(state, gain=spread)) is plain
    across = replace(state, keys=state.keys.mT.contiguous().mT)
    assert dispatch.find(query, across) is plain
    assert [said.split(" serve ")[1].split(";")[0] for said in warned()] == [
        "codes that do not lie one after the other",
        "gains or errors that do not lie one after the other",
        "a last dimension that is not contiguous",
    ]


@interpreted
def test_the_kernels_serve_where_they_are_named(monkeypatch, warned):
    """Bit for bit what torch gives in float64, where no product rounds a query another way."""
    query, codebook, state, rows, rules = case(dtype=torch.float64, batch=2)
    for k in ([[9], [9]], [[9], [5]]):
        given = query, codebook, state, replace(rows, k=torch.tensor(k, device=DEVICE)), rules
        monkeypatch.setenv("BPC_BACKEND", "torch")
        expected = decode(*given)
        monkeypatch.setenv("BPC_BACKEND", "triton")
        found = decode(*given)
        assert torch.equal(found[1], expected[1])
        torch.testing.assert_close(found[0], expected[0])
    assert warned() == []


def test_a_step_compiles_to_one_graph(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setenv("BPC_BACKEND", "triton")
    _, codebook, state, rows, rules = case(batch=2)
    at, new = torch.tensor([40], device=DEVICE), draw(2, 2, 1, 64, seed=9)

    def run(query, lengths):
        backend = dispatch.find(query, state)
        backend.append(state, codebook, new, new, at)
        out, _ = backend.sparse_decode(query * 1.0, codebook, state, replace(rows, lengths=lengths), rules)
        return out

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([60, 31], device=DEVICE)
    for seed in (3, 4):
        query = draw(2, 2, 4, 64, seed=seed)
        assert torch.equal(compiled(query, lengths), run(query, lengths))


def test_a_wrong_shape_is_refused_before_a_kernel_sees_it(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setenv("BPC_BACKEND", "triton")
    query, codebook, state, rows, rules = case()
    for wrong in (
        {"query": query[..., :32]},
        {"state": replace(state, codes=state.codes[:, :1])},
        {"state": replace(state, codes=state.codes.int())},
        {"state": replace(state, gain=state.gain[..., :9])},
        {"codebook": replace(codebook, projection=codebook.projection[:1])},
        {"rows": replace(rows, width=61)},
        {"rows": replace(rows, lengths=rows.lengths.float())},
    ):
        given = {"query": query, "codebook": codebook, "state": state, "rows": rows, "rules": rules} | wrong
        with pytest.raises(InputError):
            decode(**given)
