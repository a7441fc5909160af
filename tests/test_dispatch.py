"""Which backend serves, and what is said when one cannot."""

import logging
import subprocess
import sys

import pytest
import tiny
import torch
from drawn import DEVICE, cache, draw

from bpc_calib import InputError, enable, sparse_attention
from bpc_calib.backends import dispatch
from bpc_calib.method import choosing, encoding
from bpc_calib.method.choosing import Cached, Choice

CPU = torch.device("cpu")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")
COMPILED_HERE = ["native"] if DEVICE.type == "cpu" else []
BACKENDS = ["torch", "triton", *COMPILED_HERE]


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


def arguments(heads=4, dim=64):
    projection, encoded = cache(1, 2, 60, dim, 64)
    return draw(1, 2, heads, dim, seed=3), projection, encoded


@pytest.fixture
def no_kernels(monkeypatch):
    """Where a kernel is launched all the same, the test fails."""
    import bpc_calib.backends.triton.ops  # noqa: F401

    monkeypatch.setenv("BPC_BACKEND", "triton")
    for name in ("choose", "sparse_attention", "dense_attention", "encode_with"):
        monkeypatch.setattr(f"bpc_calib.backends.triton.pipeline.{name}", None)


def written_out(query, keys, listed):
    """Softmax attention written out."""
    rows = keys.gather(2, listed.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1]))
    return (query @ rows.mT * keys.shape[-1] ** -0.5).softmax(-1) @ rows


@pytest.mark.usefixtures("no_kernels")
def test_what_the_kernels_do_not_serve_falls_back(warned):
    query, projection, encoded = arguments(heads=17)
    given = (query, projection, Cached(encoded.codes, encoded.gain), 9, Choice(0.1, recent=1))
    for _ in range(2):
        found = dispatch.choose(*given)
    assert torch.equal(found, choosing.choose(*given))
    for tokens in (60, 17):  # as many tokens as heads are no other case
        keys, listed = draw(1, 2, tokens, 64, seed=2), found.clamp(max=tokens - 1)
        attended = dispatch.sparse_attention(query, keys, keys, listed)
        torch.testing.assert_close(attended, written_out(query, keys, listed))
    assert warned() == [
        "the triton kernels do not serve 17 query heads per KV head, more than 16; plain torch does, slowly"
    ]


@pytest.mark.parametrize("backend", ["torch", *COMPILED_HERE])
def test_padding_is_attended_around(monkeypatch, backend):
    monkeypatch.setenv("BPC_BACKEND", backend)
    query, keys = draw(2, 2, 4, 64, seed=3), draw(2, 2, 60, 64, seed=2)
    lengths, valid = torch.tensor([60, 40], device=DEVICE), torch.ones(2, 60, dtype=torch.bool, device=DEVICE)
    valid[1, :7] = valid[0, 20:30] = False
    found = dispatch.dense_attention(query, keys, keys, lengths, valid=valid)
    for row, listed in enumerate(([*range(20), *range(30, 60)], [*range(7, 40)])):
        listed = torch.tensor(listed, device=DEVICE).expand(1, 2, -1)
        expected = written_out(query[row : row + 1], keys[row : row + 1], listed)
        torch.testing.assert_close(found[row : row + 1], expected)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda keys: keys.expand(1, 1, 2, 60, 64), "5 dimensions instead of 4"),
        (lambda keys: torch.zeros(1, 2, 60, 320, device=DEVICE), "head_dim 320, above 256"),
        (lambda keys: keys.mT.contiguous().mT, "a last dimension that is not contiguous"),
        (lambda keys: keys[:, :1, :1, :].expand(1, 70000, 1, 64), "a cache [1, 70000, 1], beyond 65535 rows"),
    ],
    ids=["dimensions", "head_dim", "strides", "rows"],
)
def test_keys_that_the_kernels_do_not_take(warned, change, said):
    keys = change(draw(1, 2, 60, 64, seed=2))
    projection = draw(64, keys.shape[-1], seed=1) / 16
    encoder = encoding.make_encoder(projection, keys.dtype)
    expected = encoding.encode_with(encoder, keys)
    assert torch.equal(dispatch.encode_with(encoder, keys).codes, expected.codes)
    assert len(warned()) == 1
    assert said in warned()[0]


@interpreted
def test_the_kernels_serve_where_they_are_named(monkeypatch, warned):
    """Bit for bit what torch gives in float64, where no product rounds a query another way."""
    projection, encoded = cache(2, 2, 60, 64, 64)
    query, keys = draw(2, 2, 4, 64, seed=3, dtype=torch.float64), draw(2, 2, 60, 64, seed=2, dtype=torch.float64)
    cached, choice = Cached(encoded.codes, encoded.gain), Choice(0.1, recent=1)
    for k in (9, torch.tensor([[9], [5]], device=DEVICE)):
        monkeypatch.setenv("BPC_BACKEND", "torch")
        plain = dispatch.choose(query, projection, cached, k, choice)
        monkeypatch.setenv("BPC_BACKEND", "triton")
        launched = dispatch.choose(query, projection, cached, k, choice)
        assert torch.equal(plain, launched)
        attended = dispatch.sparse_attention(query, keys, keys, launched)
        monkeypatch.setenv("BPC_BACKEND", "torch")
        torch.testing.assert_close(attended, sparse_attention(query, keys, keys, plain))
    assert warned() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_attention_reads_no_further_than_the_length(monkeypatch, backend):
    if DEVICE.type == "cpu" or backend == "torch":
        monkeypatch.setenv("BPC_BACKEND", backend)
    query, keys, values = draw(2, 2, 4, 64, seed=3), draw(2, 2, 150, 64, seed=2), draw(2, 2, 150, 64, seed=4)
    lengths = torch.tensor([150, 70], device=DEVICE)
    for scaling in (None, 0.3):
        found = dispatch.dense_attention(query, keys, values, lengths, scaling)
        for row, length in enumerate(lengths.tolist()):
            logits = query[row] @ keys[row, :, :length].mT * (64**-0.5 if scaling is None else scaling)
            expected = logits.softmax(-1) @ values[row, :, :length]
            torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


def test_dense_attention_refuses_what_does_not_fit(monkeypatch):
    query, keys = draw(2, 2, 4, 64), draw(2, 2, 60, 64)
    lengths, valid = torch.tensor([60, 40], device=DEVICE), torch.ones(2, 60, dtype=torch.bool, device=DEVICE)
    for backend in BACKENDS if DEVICE.type == "cpu" else ["torch"]:
        monkeypatch.setenv("BPC_BACKEND", backend)
        for wrong in (
            {"query": query[..., :32]},
            {"query": query.double()},
            {"keys": keys[:1]},
            {"values": keys[:, :, :9]},
            {"values": keys.half()},
            {"lengths": lengths[:1]},
            {"lengths": lengths.float()},
            {"valid": valid[:, :9]},
            {"valid": valid.long()},
        ):
            given = {"query": query, "keys": keys, "values": keys, "lengths": lengths} | wrong
            with pytest.raises(InputError, match=r"not fit"):
                dispatch.dense_attention(**given)


def test_a_step_compiles_to_one_graph(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setenv("BPC_BACKEND", "triton")
    projection, encoded = cache(2, 2, 60, 64, 64)
    keys, lengths = draw(2, 2, 60, 64, seed=2), torch.tensor([60, 31], device=DEVICE)

    def step(query, lengths):
        codes = dispatch.encode_with(encoding.make_encoder(projection, keys.dtype), keys).codes
        cached = Cached(codes, encoded.gain, lengths=lengths)
        indices = dispatch.choose(query, projection, cached, 9, Choice(0.1, recent=1))
        return dispatch.sparse_attention(query * 1.0, keys, keys, indices)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in (3, 4):
        query = draw(2, 2, 4, 64, seed=seed)
        assert torch.equal(compiled(query, lengths), step(query, lengths))


def test_a_wrong_shape_is_refused_before_a_kernel_sees_it(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setenv("BPC_BACKEND", "triton")
    query, keys = draw(1, 2, 4, 64), draw(1, 2, 60, 64)
    with pytest.raises(InputError, match="do not fit"):
        dispatch.sparse_attention(query, keys, keys, torch.zeros(1, 3, 5, dtype=torch.int64, device=DEVICE))
    projection, encoded = cache(1, 2, 60, 64, 64)
    for wrong in (
        {"query": query[..., :32]},
        {"codes": encoded.codes[:, :1]},
        {"codes": encoded.codes.int()},
        {"gain": encoded.gain[..., :9]},
        {"projection": projection[:, :48]},
        {"k": 61},
        {"k": -1},
        {"group": "mean"},
    ):
        given = {"query": query, "projection": projection, "codes": encoded.codes, "gain": encoded.gain, "k": 9} | wrong
        cached, choice = Cached(given["codes"], given["gain"]), Choice(0.1, given.get("group", "relative"))
        with pytest.raises(InputError):
            dispatch.choose(given["query"], given["projection"], cached, given["k"], choice)
