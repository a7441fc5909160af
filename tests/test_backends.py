"""Every backend against plain torch, bit for bit: Triton's kernels, interpreted or on a GPU, and those of a CPU."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from drawn import DEVICE, EXACT, FLOAT64, draw, integers

from bpc_calib import InputError
from bpc_calib.backends import plain
from bpc_calib.backends.protocol import Backend
from bpc_calib.method import step
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.encoding import encode_gram, encode_with
from bpc_calib.method.rules import Rules
from bpc_calib.method.selection import worst_first
from bpc_calib.method.state import Rows, State, write_newest

GPU = torch.cuda.is_available()
PAGE = 16


@pytest.fixture(
    params=[
        pytest.param("triton", marks=[pytest.mark.gpu] if GPU else []),
        pytest.param("cpu", marks=pytest.mark.skipif(GPU, reason="the tensors of these tests are on the GPU here")),
    ]
)
def pipeline(request):
    name = "backend" if request.param == "cpu" else "pipeline"
    return importlib.import_module(f"bpc_calib.backends.{request.param}.{name}")


def backend_of(pipeline):
    return importlib.import_module(pipeline.__name__.replace("pipeline", "backend"))


def is_cpu(pipeline):
    return ".cpu." in pipeline.__name__


def skip_unserved(pipeline, dtype):
    if dtype == torch.float64 and is_cpu(pipeline):
        pytest.skip("plain torch serves float64 on a CPU")


def rounded(pipeline, query, codebook, state, rows, rules):
    """The tables of the queries, as a backend rounds them."""
    if is_cpu(pipeline):
        return pipeline.rank(query, codebook, state, rows, rules)[1]
    return pipeline.quantized(pipeline.score(query, codebook, state, rows, rules), len(query))


@dataclass
class Case:
    """A step. Keys and matrices are of numbers that every product and sum holds exactly, so codes are equal bits."""

    layout: str = "growing"  # or "static": lengths within a larger buffer; or "paged"
    padding: bool = False
    fresh: int = 0
    apart: bool = False  # a number of tokens for each head
    safeguard: float = 0.0
    batch: int = 2
    heads: int = 4
    dim: int = 64
    bits: int = 64
    nibbles: bool = False
    tokens: int = 200
    k: int = 20
    dtype: torch.dtype = torch.float32
    own: bool = False  # each sequence has a codebook
    rules: dict[str, Any] = field(default_factory=dict)

    def made(self):
        """The arguments of `sparse_decode`, with two equal states."""
        batch, tokens, dim, kv_heads = self.batch, self.tokens, self.dim, 2
        lead = (batch, kv_heads) if self.own else (kv_heads,)
        projection = integers(*lead, self.bits * (4 if self.nibbles else 1), dim, most=3, seed=1) / 8
        codebook = make_codebook(projection, self.dtype, mean=projection[..., 0, :] * 8, nibbles=self.nibbles)
        query = draw(batch, kv_heads, self.heads, dim, seed=3, dtype=self.dtype)
        room = -(-(tokens + 30) // PAGE) * PAGE
        keys = integers(batch, kv_heads, room, dim, most=9, seed=4).to(self.dtype)
        values = draw(batch, kv_heads, room, dim, seed=5, dtype=self.dtype)
        encoded = encode_with(codebook, keys)
        rules = Rules(**({"scaling": 0.1, "safeguard": self.safeguard} | self.rules))
        lengths = torch.full((batch,), tokens, device=DEVICE)
        if self.layout != "growing":
            lengths -= 7 * torch.arange(batch, device=DEVICE)
        valid = None
        if self.padding:
            valid = torch.rand(batch, room, generator=torch.Generator().manual_seed(7)).to(DEVICE) > 0.3
            valid[0, : tokens // 3] = False
        k = torch.full((batch, 2 if self.apart else 1), self.k, device=DEVICE)
        if self.apart:
            k -= torch.arange(2 * batch, device=DEVICE).view(batch, 2) % self.k
        longest = tokens if self.layout == "growing" else room
        rows = Rows(lengths, k, longest, min(self.k + 3, longest), valid)
        state = State(keys, values, encoded.codes, encoded.gain, encoded.error if self.safeguard else None)
        for each in (state.codes, state.gain, state.error):
            if each is not None:
                each[:, :, tokens - self.fresh : tokens] = 7  # no code yet
        if self.safeguard:
            state = replace(state, worst=worst_first(encoded.error[:, :, : tokens // 2]))
        if self.layout == "paged":
            table = torch.randperm(batch * room // PAGE, generator=torch.Generator().manual_seed(6)).view(batch, -1)
            rows = replace(rows, block_table=table.int().to(DEVICE))
            tensors = {name: each for name, each in vars(state).items() if isinstance(each, torch.Tensor)}
            state = State(**{name: in_pages(each, table) for name, each in tensors.items()})
        return query, codebook, state, copied(state), rows, rules


def in_pages(rows, table):
    """`[B, H, room, ...]` as `[pages, H, PAGE, ...]`."""
    pages = rows.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
    found = torch.empty_like(pages)
    found[table.flatten().to(rows.device)] = pages
    return found


def copied(state):
    return State(
        **{name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in vars(state).items()}
    )


def check(pipeline, case, decode: Callable | None = None):
    """A step of a backend, or another one, is that of the oracle."""
    query, codebook, state, expected, rows, rules = case.made()
    out, chosen = (decode or backend_of(pipeline).sparse_decode)(query, codebook, state, rows, rules, fresh=case.fresh)
    if case.fresh:
        write_newest(encode_with(codebook, step.newest(expected, rows, case.fresh)), rows, expected)
    for name in ("codes", "gain", "error"):
        one, other = getattr(state, name), getattr(expected, name)
        assert one is other is None or torch.equal(one, other), name
    query8 = rounded(pipeline, query, codebook, expected, rows, rules)
    wanted = step.best(query8, expected, rows, rules, case.dim)
    assert torch.equal(chosen, wanted)
    assert chosen.shape[-1] == rows.width
    within = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(case.dtype, 2e-5)
    attended = step.attend(query, expected, rows, wanted, 0.1)
    torch.testing.assert_close(out, attended, rtol=within, atol=within)
    if decode is None:  # the two halves of a step, of which the first reads neither keys nor values
        backend, nowhere = backend_of(pipeline), state.keys.to("meta")
        codes_alone = replace(state, keys=nowhere, values=nowhere)
        assert torch.equal(backend.choose(query, codebook, codes_alone, rows, rules), wanted)
        out = backend.attend(query, state, rows, wanted, rules.scaling)
        torch.testing.assert_close(out, attended, rtol=within, atol=within)


def signatures(module, names):
    return {name: inspect.signature(getattr(module, name)) for name in names}


def test_backends_have_the_signatures_of_the_protocol():
    names = [name for name in vars(Backend) if not name.startswith("_")]
    assert len(names) == 8
    expected = {}
    for name, signature in signatures(Backend, names).items():
        _, *parameters = signature.parameters.values()  # a module's functions have no self
        expected[name] = signature.replace(parameters=parameters)
    for module in ("plain", "triton.backend", "cpu.backend"):
        backend = importlib.import_module(f"bpc_calib.backends.{module}")
        assert sorted(backend.__all__) == sorted(names), module
        assert signatures(backend, names) == expected, module


LAYOUTS = [  # layout, padding, fresh tokens
    *(("growing", padding, fresh) for padding in (False, True) for fresh in (0, 1, 6)),
    *(("static", padding, 0) for padding in (False, True)),
    ("paged", False, 0),
]


@pytest.mark.emulated(fresh=[0, 1], apart=[True])
@pytest.mark.parametrize("safeguard", [0.0, 0.4])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("layout", "padding", "fresh"), LAYOUTS)
def test_a_step(layout, padding, fresh, apart, safeguard, pipeline):
    if layout == "paged" and safeguard:
        pytest.skip("pages have no safeguard")
    forced = {"recent": 3, "sink": 2} if apart else {}
    check(pipeline, Case(layout, padding, fresh, apart, safeguard, rules=forced))


@pytest.mark.parametrize("bits", [32, 64, 128])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(padding=True, fresh=1, apart=True), Case("static", safeguard=0.4), Case("paged"), Case(fresh=6),
     Case(heads=5, dim=80, dtype=torch.bfloat16, fresh=1, own=True)],
)  # fmt: skip
def test_a_step_with_nibbles(case, bits, pipeline):
    if not is_cpu(pipeline):
        pytest.skip("Triton's kernels know signs only")
    check(pipeline, replace(case, bits=bits, nibbles=True))


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


@pytest.mark.emulated(
    shape=["usual", "one head", "five heads", "sixteen heads of 128 bits"], group=["relative"], gain=[True]
)
@pytest.mark.emulated(shape=["five heads"], group=["max"], gain=[False])
# Every shape with every group and with and without gains; one shape has all.
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("group", ["relative", "max"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, group, gain, pipeline):
    batch, heads, dim, bits, tokens = SHAPES[shape]
    case = Case(batch=batch, heads=heads, dim=dim, bits=bits, tokens=tokens, k=-(-tokens // 9))
    check(pipeline, replace(case, rules={"group": group, "gain": gain}))


@pytest.mark.emulated(heads=[5], dtype=[torch.float32, torch.bfloat16])
@pytest.mark.emulated(heads=[3], dtype=[torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [*FLOAT64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "k"), [(16, 256, 300, 300), (5, 80, 200, 65), (3, 72, 200, 131), (2, 8, 40, 20)]
)
def test_dtypes(dtype, heads, dim, tokens, k, pipeline):
    skip_unserved(pipeline, dtype)
    check(pipeline, Case(dtype=dtype, heads=heads, dim=dim, tokens=tokens, k=k, fresh=1))


@pytest.mark.emulated(k=[59])
@pytest.mark.parametrize("k", [1, 2, 59, 60])
@pytest.mark.parametrize("rules", [{}, {"recent": 1, "sink": 4}, {"recent": 7}, {"recent": 1, "safeguard": 0.5}])
def test_every_k(k, rules, pipeline):
    check(pipeline, Case(tokens=60, k=k, safeguard=rules.get("safeguard", 0.0), rules=rules))


@pytest.mark.emulated
def test_a_mask_whose_tokens_lie_apart(pipeline):
    """As one that lies with tokens before sequences."""
    case = Case(padding=True)
    *given, rows, rules = case.made()
    assert rows.valid.stride(1) == 1
    apart = replace(rows, valid=rows.valid.T.contiguous().T)
    case.made = lambda: (*given, apart, rules)
    check(pipeline, case)


@pytest.mark.emulated(layout=["static"])
@pytest.mark.parametrize("layout", ["growing", "static", "paged"])
def test_each_sequence_with_a_codebook_of_its_own(layout, pipeline):
    if layout == "paged":
        pytest.skip("pages share prompts, so they share codebooks")
    check(pipeline, Case(layout, own=True, fresh=layout == "growing"))


@pytest.mark.emulated(group=["max"])
@pytest.mark.parametrize("group", ["relative", "max"])
def test_all_ties_go_to_the_lowest_indices(group, pipeline):
    query, codebook, state, _, rows, rules = Case(tokens=2100, k=40, rules={"group": group}).made()
    rows, decode = replace(rows, width=40), backend_of(pipeline).sparse_decode
    _, found = decode(0 * query, codebook, state, rows, rules)
    assert found[0].tolist() == [list(range(40))] * 2
    _, found = decode(0 * query, codebook, state, rows, replace(rules, recent=3, sink=2))
    assert found[0].tolist() == [[*range(37), 2097, 2098, 2099]] * 2


@pytest.mark.emulated
def test_few_scores_so_many_ties(pipeline):
    for k in (7, 300, 301, 777):
        case = Case(batch=1, bits=32, tokens=1500, k=k, rules={"gain": False})
        made = case.made

        def tied(made=made):
            query, codebook, state, _, rows, rules = made()
            state.codes[:] = state.codes[:, :, :5].repeat(1, 1, state.room // 5 + 1, 1)[:, :, : state.room]
            return query, codebook, state, copied(state), rows, rules

        case.made = tied
        check(pipeline, case)


@pytest.mark.emulated
def test_nothing_behind_the_length_is_read(pipeline):
    query, codebook, state, other, rows, rules = Case("static").made()
    decode = backend_of(pipeline).sparse_decode
    out, found = decode(query, codebook, state, rows, rules)
    other.codes[:, :, 200:], other.gain[:, :, 200:], other.values[:, :, 200:] = -1, 255, 1e30
    again = decode(query, codebook, other, rows, rules)
    assert torch.equal(out, again[0])
    assert torch.equal(found, again[1])
    assert found.max() < 200


@pytest.mark.emulated
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("layout", ["growing", "static", "paged"])
def test_attention_to_everything(layout, padding, pipeline):
    """Reads no further than the lengths; a backend may leave padding and pages to plain torch."""
    if layout == "paged" and padding:
        pytest.skip("pages have no padding")
    query, _, state, _, rows, _ = Case(layout, padding=padding).made()
    found = backend_of(pipeline).dense_decode(query, state, rows, 0.3)
    everything = torch.arange(rows.longest, device=DEVICE).expand(2, 2, -1)
    seen = everything < rows.lengths.view(2, 1, 1)
    if padding:
        seen &= rows.valid[:, None, : rows.longest]
    exact = State(state.keys.double(), state.values.double())
    expected = step.attend(query.double(), exact, rows, everything.where(seen, -1), 0.3)
    # Plain torch itself is more than 1e-5 away on some processors: logits of up to 100 are rounded in float32.
    if not torch.equal(found, step.dense_decode(query, state, rows, 0.3)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.emulated(new=[2, 17])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("new", "heads", "dim"), [(2, 1, 64), (5, 3, 64), (4, 4, 80), (9, 3, 20), (17, 5, 128)])
def test_attention_of_several_new_tokens(new, heads, dim, padding, pipeline):
    """Each of them sees itself and the tokens before it."""
    query, _, state, _, rows, _ = Case("growing", padding=padding, heads=heads * new, dim=dim).made()
    found = backend_of(pipeline).dense_decode(query, state, rows, 0.3, new=new)
    for place in range(new):
        length = rows.longest - new + 1 + place
        one = replace(rows, lengths=torch.full_like(rows.lengths, length), longest=length, width=1)
        expected = step.dense_decode(query[:, :, place::new], state, one, 0.3)
        # Logits of up to 100 are rounded in float32.
        torch.testing.assert_close(found[:, :, place::new], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.emulated
def test_what_does_not_fit_is_refused(pipeline):
    query, codebook, state, _, rows, rules = Case(batch=1).made()
    backend = backend_of(pipeline)
    for wrong, said in (
        ({"query": query[..., :32]}, "keys .* do not fit query"),
        ({"query": query.half()}, "keys torch.float32 .* do not fit query torch.float16"),
        ({"state": replace(state, codes=None)}, "a sparse step needs codes"),
        ({"state": replace(state, codes=state.codes.int())}, "codes torch.int32"),
        ({"state": replace(state, codes=state.codes[:, :1])}, "codes .* do not fit"),
        ({"state": replace(state, values=state.values[:, :, :9])}, "values .* do not fit"),
        ({"state": replace(state, gain=state.gain.int())}, "gain torch.int32"),
        ({"state": replace(state, worst=state.gain[:, :1])}, "worst must be integers"),
        ({"rows": replace(rows, lengths=rows.lengths.float())}, "lengths must be integers"),
        ({"rows": replace(rows, k=rows.k[0])}, r"k must be integers \[B, 1\]"),
        ({"rows": replace(rows, longest=state.room + 1)}, "codes|keys"),
        ({"rows": replace(rows, width=201)}, "201 of 200 tokens"),
        ({"rows": replace(rows, valid=torch.ones(1, 9, dtype=torch.bool, device=DEVICE))}, "valid must be bool"),
        ({"codebook": make_codebook(draw(2, 32, 64), torch.bfloat16)}, "does not fit query"),
        ({"codebook": make_codebook(draw(3, 64, 64), torch.float32)}, "projection .* does not fit query"),
    ):
        given = {"query": query, "codebook": codebook, "state": state, "rows": rows} | wrong
        with pytest.raises(InputError, match=said):
            backend.sparse_decode(**given, rules=rules)
    for k in (-1, 10**9):
        with pytest.raises(InputError):
            plain.sparse_decode(query, codebook, state, replace(rows, k=rows.k * 0 + k), rules)
    with pytest.raises(InputError, match="group must be one of"):
        replace(rules, group="mean")


FAULTS = {  # what a step forgets
    "padding": (Case(padding=True), lambda made: made | {"rows": replace(made["rows"], valid=None)}),
    "lengths": (
        Case("static"),
        lambda made: made | {"rows": replace(made["rows"], lengths=made["rows"].lengths * 0 + 200)},
    ),
    "numbers by head": (Case(apart=True), lambda made: made | {"rows": replace(made["rows"], k=made["rows"].k[:, :1])}),
    "safeguard": (Case(safeguard=0.4), lambda made: made | {"rules": replace(made["rules"], safeguard=0.0)}),
    "fresh token": (Case(fresh=1), lambda made: made | {"fresh": 0}),
    "gain": (Case(), lambda made: made | {"rules": replace(made["rules"], gain=False)}),
    "group": (Case(), lambda made: made | {"rules": replace(made["rules"], group="max")}),
    "newest tokens": (Case(rules={"recent": 5}), lambda made: made | {"rules": replace(made["rules"], recent=0)}),
    "block table": (
        Case("paged"),
        lambda made: made | {"rows": replace(made["rows"], block_table=made["rows"].block_table.flip(1).contiguous())},
    ),
    "scaling": (Case(), lambda made: made | {"rules": replace(made["rules"], scaling=0.3)}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.skipif(GPU, reason="the tensors of these tests are on the GPU here")
def test_a_backend_that_forgets_something_fails(fault):
    case, change = FAULTS[fault]
    cpu = importlib.import_module("bpc_calib.backends.cpu.backend")

    def forgetful(query, codebook, state, rows, rules, fresh):
        given = {"query": query, "codebook": codebook, "state": state, "rows": rows, "rules": rules, "fresh": fresh}
        return backend_of(cpu).sparse_decode(**change(given))

    check(cpu, case)
    with pytest.raises(AssertionError):
        check(cpu, case, forgetful)


@pytest.mark.emulated(bits=[32, 64], tokens=[65], dtype=[torch.float32])
@pytest.mark.parametrize(
    ("bits", "tokens"),
    [
        *((64, 1), (64, 65)),  # a block and one token more
        *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((32, 65), (32, 150), (128, 65), (128, 150))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_from_the_same_products_are_exact(bits, tokens, dtype, pipeline):
    skip_unserved(pipeline, dtype)
    heads = 20 if is_cpu(pipeline) else 5  # which may be interpreted
    scores, gram = draw(heads, tokens, bits, dtype=dtype), 0.3 * draw(heads, bits, bits, seed=1, dtype=dtype)
    scores[0, tokens // 20] = 0
    norm = 50 * draw(heads, tokens, seed=2, dtype=dtype).abs()
    norm[1, tokens // 40] = 0
    found, expected = pipeline.encode_gram(scores, gram, norm), encode_gram(scores, gram, norm)
    for name in ("codes", "error", "gain"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.emulated(bits=[64, 32], measured=[True])
@pytest.mark.parametrize("measured", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("dtype", "dim", "bits"),
    [(torch.float32, 64, 64), (torch.bfloat16, 128, 64), (torch.float16, 80, 32), (torch.bfloat16, 256, 128),
     *((dtype, 96, 128) for dtype in FLOAT64)],
)  # fmt: skip
def test_codes_of_keys(dtype, dim, bits, measured, pipeline):
    """With metric and mean and without; the keys strided, some of them zero."""
    skip_unserved(pipeline, dtype)
    projection = draw(2, bits, dim, seed=1) / (2 * dim**0.5)
    some = draw(2, dim, dim, seed=4)
    metric = some @ some.mT / dim + torch.eye(dim, device=DEVICE) if measured else None
    mean = draw(2, dim, seed=5) if measured else None
    keys = draw(2, 70, 2, dim, seed=2, dtype=dtype).transpose(1, 2)  # more than a block
    keys[:, :, 5] = 0
    codebook = make_codebook(projection, dtype, metric=metric, mean=mean)
    for some in (keys, keys[:, :, 3:6]):  # in blocks, and few at a time
        found, expected = pipeline.encode_with(codebook, some), encode_with(codebook, some)
        assert (found.codes != expected.codes).any(-1).sum() <= 2
        assert (found.gain.int() - expected.gain.int()).abs().max() <= 1
        torch.testing.assert_close(found.error, expected.error, rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match=f"do not fit a projection of head_dim {dim}"):
        pipeline.encode_with(codebook, keys[..., : dim // 2])


FORMS = ("metric and mean", "each sequence's own", "neither gain nor error")
APPENDED = [  # dtype, head_dim, bits, form
    *((torch.float32, 64, 64, form) for form in FORMS),
    *((torch.float16, 80, 32, form) for form in FORMS),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            *((torch.bfloat16, 128, 128, FORMS[each]) for each in (0, 2)),
            *((torch.bfloat16, 256, 64, FORMS[each]) for each in (1, 2)),
            (torch.float32, 8, 64, FORMS[0]),
            *((dtype, 64, 64, FORMS[each]) for dtype in FLOAT64 for each in (0, 1)),
        )
    ),
]  # fmt: skip


@pytest.mark.emulated(form=["metric and mean"], bits=[32, 128])
@pytest.mark.emulated(form=["each sequence's own"], bits=[32])
@pytest.mark.emulated(form=["neither gain nor error"], dtype=[torch.float32], dim=[64])
@pytest.mark.parametrize(("dtype", "dim", "bits", "form"), APPENDED)
def test_appends_a_token(dtype, dim, bits, form, pipeline):
    """Of numbers that every product and sum holds exactly, so that codes, gains and errors are equal bit for bit."""
    skip_unserved(pipeline, dtype)
    batch, kv_heads, room = 2, 3, 21
    lead = (batch, kv_heads) if form == "each sequence's own" else (kv_heads,)
    projection = integers(*lead, bits, dim, most=3, seed=1) / 8
    metric = mean = None
    if form != "neither gain nor error":
        root = integers(*lead, dim, dim, most=1, seed=2) * (torch.rand(dim, device=DEVICE) < 0.1)
        metric, mean = root + root.mT + 8 * torch.eye(dim, device=DEVICE), projection[..., 0, :] * 8
    codebook = make_codebook(projection, dtype, metric=metric, mean=mean)
    keys = integers(batch, 4, kv_heads, dim, most=9, seed=3).to(dtype).transpose(1, 2)  # not contiguous
    keys[1, :, 2] = 0
    values = integers(batch, kv_heads, 4, dim, most=9, seed=4).to(dtype)
    kept = form != "neither gain nor error"
    filled = []
    for module in (plain, backend_of(pipeline)):
        state = State(
            keys=torch.full((batch, kv_heads, room + 3, dim), 7, dtype=dtype, device=DEVICE)[:, :, :room],
            values=torch.full((batch, room, kv_heads, dim), 7, dtype=dtype, device=DEVICE).transpose(1, 2),
            codes=torch.full((batch, kv_heads, room, -(-bits // 64)), 7, device=DEVICE),
            gain=torch.full((batch, kv_heads, room), 7, dtype=torch.uint8, device=DEVICE) if kept else None,
            error=torch.full((batch, kv_heads, room), 7.0, device=DEVICE) if kept else None,
        )
        for n, place in enumerate((0, 20, 7, 8)):
            one, at = slice(n, n + 1), torch.tensor([place], device=DEVICE)
            module.append(state, codebook, keys[:, :, one], values[:, :, one], at)
        filled.append(state)
    for name, expected in vars(filled[0]).items():
        found = getattr(filled[1], name)
        assert found is expected or torch.equal(found, expected), name


@pytest.mark.emulated(tokens=[1, 20])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_appends_to_pages(tokens, pipeline):
    """Anywhere, and not where a slot is negative; codes alone, or keys and values with them."""
    _, codebook, state, other, _, _ = Case("paged").made()
    keys, values = (integers(1, 2, tokens, 64, most=9, seed=seed) for seed in (11, 12))
    at = torch.randperm(state.keys.shape[0] * PAGE, generator=torch.Generator().manual_seed(3))[:tokens].to(DEVICE)
    at[tokens // 3] = -1 if tokens > 1 else at[0]
    for new in (None, values):
        plain.append(other, codebook, keys, new, at)
        backend_of(pipeline).append(state, codebook, keys, new, at)
        for name in ("keys", "values", "codes", "gain"):
            assert torch.equal(getattr(state, name), getattr(other, name)), name
    page, place = at[-1] // PAGE, at[-1] % PAGE
    assert torch.equal(state.keys[page, :, place], keys[0, :, -1])


@pytest.mark.emulated
def test_appends_without_codes(pipeline):
    backend = backend_of(pipeline)
    state = State(torch.zeros(1, 2, 5, 64, device=DEVICE), torch.zeros(1, 2, 5, 64, device=DEVICE))
    key, value, at = draw(1, 2, 1, 64), draw(1, 2, 1, 64, seed=1), torch.tensor([3], device=DEVICE)
    backend.append(state, None, key, value, at)
    assert torch.equal(state.keys[:, :, 3:4], key)
    assert torch.equal(state.values[:, :, 3:4], value)
    assert state.keys.count_nonzero() == state.values.count_nonzero() == 128
    wide, narrow = (make_codebook(draw(2, bits, 64), torch.float32) for bits in (128, 64))
    codes = torch.zeros(1, 2, 5, 1, dtype=torch.int64, device=DEVICE)
    for given, said in (
        ((state, narrow, key, value, at), "a codebook needs a state with codes"),
        ((replace(state, keys=state.keys.half()), None, key, value, at), "key torch.float32 does not fit its buffer"),
        ((state, None, key, value, torch.tensor(3, device=DEVICE)), r"at must be integers \[T\]"),
        ((state, None, key, None, at), "append needs values or a codebook"),
        ((replace(state, codes=codes), wide, key, value, at), "codes of 128 bits do not fit"),
    ):
        with pytest.raises(InputError, match=said):
            backend.append(*given)


@pytest.mark.emulated
def test_attention_over_nothing_is_zero(pipeline):
    query, keys = draw(2, 2, 4, 64), draw(2, 2, 50, 64, seed=1)
    indices = torch.full((2, 2, 5), -1, device=DEVICE)
    indices[0] = torch.arange(5)
    lengths = torch.full((2,), 50, device=DEVICE)
    rows, state = Rows(lengths, lengths.unsqueeze(-1), 50, 5), State(keys, keys)
    found = pipeline.attend(query, state, rows, indices)
    assert (found[1] == 0).all()
    torch.testing.assert_close(
        found[:1],
        step.attend(query, state, rows, indices)[:1],
        rtol=EXACT[torch.float32],
        atol=EXACT[torch.float32],
    )
