"""Every backend against plain torch, bit for bit: Triton's kernels, interpreted or on a GPU, and those of a CPU."""

import importlib
import inspect

import pytest
import torch
from drawn import DEVICE, EXACT, FLOAT64, cache, draw

from bpc_calib import InputError
from bpc_calib.backends import dispatch
from bpc_calib.backends.protocol import Backend
from bpc_calib.method import appending, stepping
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice, choose_quantized
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import encode_gram, encode_with, make_encoder
from bpc_calib.method.selection import worst_first
from bpc_calib.method.sparse_attention import sparse_attention
from bpc_calib.method.stepping import Hashed

GPU = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param("triton", marks=[pytest.mark.gpu] if GPU else []),
        pytest.param("cpu", marks=pytest.mark.skipif(GPU, reason="the tensors of these tests are on the GPU here")),
    ]
)
def pipeline(request):
    return importlib.import_module(f"bpc_calib.backends.{request.param}.pipeline")


def skip_unserved(pipeline, dtype):
    if dtype == torch.float64 and pipeline.__name__ == "bpc_calib.backends.cpu.pipeline":
        pytest.skip("plain torch serves float64 on a CPU")


@pytest.fixture
def both(pipeline):
    """What a backend chooses, and what the oracle does from the same int8 queries."""

    def chosen(query, projection, encoded, k, *, gain=True, valid=None, lengths=None, worst=None, width=None, **rules):
        cached = Cached(encoded.codes, encoded.gain if gain else None, valid, lengths, worst)
        choice = Choice(**({"scaling": 0.1} | rules))
        found = pipeline.choose(query, projection, cached, k, choice, width=width)
        quantized = pipeline.quantize_query(query, projection)
        return found, choose_quantized(quantized, cached, k, choice, width=width)

    return chosen


def signatures(module, names):
    return {name: inspect.signature(getattr(module, name)) for name in names}


def test_backends_have_the_signatures_of_the_protocol():
    names = [name for name in vars(Backend) if not name.startswith("_")]
    expected = {}
    for name, signature in signatures(Backend, names).items():
        _, *parameters = signature.parameters.values()  # a module's functions have no self
        expected[name] = signature.replace(parameters=parameters)
    for module in ("plain", "triton.backend", "cpu.backend"):
        backend = importlib.import_module(f"bpc_calib.backends.{module}")
        assert sorted(backend.__all__) == sorted(names), module
        assert signatures(backend, names) == expected, module
    dispatched = ["append", "choose", "dense_attention", "encode_with", "sparse_attention", "step"]
    assert signatures(dispatch, dispatched) == {name: expected[name] for name in dispatched}


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
@pytest.mark.seldom(shape=set(SHAPES) - {"seven heads"}, group=["relative"], gain=[False])
@pytest.mark.seldom(shape=set(SHAPES) - {"seven heads"}, group=["max"], gain=[True])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("group", ["relative", "max"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chooses_what_the_oracle_chooses(shape, group, gain, both):
    batch, heads, dim, bits, tokens = SHAPES[shape]
    projection, encoded = cache(batch, 2, tokens, dim, bits)
    found, expected = both(
        draw(batch, 2, heads, dim, seed=3), projection, encoded, -(-tokens // 9), group=group, gain=gain
    )
    assert torch.equal(found, expected)


@pytest.mark.emulated(k=[59])
@pytest.mark.parametrize("k", [1, 2, 59, 60])
@pytest.mark.parametrize("rules", [{}, {"recent": 1, "sink": 4}, {"recent": 7}, {"recent": 1, "safeguard": 0.5}])
def test_every_k(k, rules, both):
    projection, encoded = cache(1, 2, 60, 64, 64)
    if "safeguard" in rules:
        rules = rules | {"worst": worst_first(encoded.error)}
    found, expected = both(draw(1, 2, 4, 64, seed=3), projection, encoded, k, **rules)
    assert torch.equal(found, expected)


@pytest.mark.emulated(group=["max"])
@pytest.mark.parametrize("group", ["relative", "max"])
def test_all_ties_go_to_the_lowest_indices(group, both):
    projection, encoded = cache(1, 2, 2100, 64, 64)
    found, expected = both(torch.zeros(1, 2, 4, 64, device=DEVICE), projection, encoded, 40, group=group)
    assert found[0].tolist() == [list(range(40))] * 2
    assert torch.equal(found, expected)
    found, expected = both(
        torch.zeros(1, 2, 4, 64, device=DEVICE), projection, encoded, 40, group=group, recent=3, sink=2
    )
    assert found[0].tolist() == [[*range(37), 2097, 2098, 2099]] * 2
    assert torch.equal(found, expected)


def test_few_scores_so_many_ties(both):
    projection, encoded = cache(1, 1, 1500, 64, 32)
    encoded.codes[:, :, :] = encoded.codes[:, :, :5].repeat(1, 1, 300, 1)
    for k in (7, 300, 301, 777):
        found, expected = both(draw(1, 1, 4, 64, seed=3), projection, encoded, k, gain=False)
        assert torch.equal(found, expected)


@pytest.mark.emulated
@pytest.mark.parametrize("rules", [{}, {"recent": 3, "sink": 2}, {"recent": 1, "sink": 1, "safeguard": 0.4}])
def test_padded_sequences_in_a_larger_buffer(rules, both):
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


@pytest.mark.emulated
def test_a_list_wider_than_k_ends_in_minus_one(both):
    projection, encoded = cache(1, 2, 257, 64, 64)
    found, expected = both(draw(1, 2, 4, 64, seed=3), projection, encoded, 49, width=52)
    assert torch.equal(found, expected)
    assert (found[..., 49:] == -1).all()


def test_nothing_behind_the_length_is_read(both):
    projection, encoded = cache(1, 2, 300, 64, 64)
    lengths = torch.tensor([257], device=DEVICE)
    query = draw(1, 2, 4, 64, seed=3)
    found, _ = both(query, projection, encoded, 20, lengths=lengths)
    encoded.codes[:, :, 257:] = -1
    encoded.gain[:, :, 257:] = 255
    again, _ = both(query, projection, encoded, 20, lengths=lengths)
    assert torch.equal(found, again)
    assert found.max() < 257


def test_codes_that_are_not_side_by_side(both):
    projection, encoded = cache(1, 2, 70, 64, 128)
    wide = torch.stack([encoded.codes, encoded.codes], dim=3).flatten(3)[..., :2]  # a gap behind every key
    assert wide.stride(2) == 4
    query = draw(1, 2, 4, 64, seed=3)
    found, expected = both(query, projection, type(encoded)(wide, encoded.error, encoded.gain), 9)
    assert torch.equal(found, expected)


def test_each_sequence_with_projections_of_its_own(both):
    projection, encoded = cache(2, 2, 90, 64, 64)
    own = torch.stack([projection, -projection.flip(1)]).mT.contiguous().mT  # not contiguous
    found, expected = both(draw(2, 2, 4, 64, seed=3), own, encoded, 9)
    assert torch.equal(found, expected)


@pytest.mark.emulated(bits=[32, 64], tokens=[65], dtype=[torch.float32])
@pytest.mark.seldom(tokens=[1])  # 65 tokens have a block of one, too
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
    heads = 5 if pipeline.__name__ == "bpc_calib.backends.triton.pipeline" else 20  # which may be interpreted
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
    encoder = make_encoder(projection, dtype, metric=metric, mean=mean)
    found, expected = pipeline.encode_with(encoder, keys), encode_with(encoder, keys)
    assert (found.codes != expected.codes).any(-1).sum() <= 2
    assert (found.gain.int() - expected.gain.int()).abs().max() <= 1
    torch.testing.assert_close(found.error, expected.error, rtol=1e-3, atol=1e-3)


@pytest.mark.emulated(lead=[(3, 2)], measured=["alike"])
@pytest.mark.seldom(lead=[(), (3, 1), (3, 2)], measured=["once"])  # what is measured once meets one of the leads
@pytest.mark.seldom(lead=[(1, 2)], measured=["alike"])  # as (3, 2)
@pytest.mark.parametrize("measured", ["once", "alike"])
@pytest.mark.parametrize(
    "lead", [(), *(pytest.param(each, marks=pytest.mark.slow) for each in ((1,), (2,))), (1, 2), (3, 2), (3, 1)]
)
def test_projections_shared_by_heads_or_sequences(lead, measured, pipeline):
    """With one metric and mean for all, and with as many as there are projections, as online ones have."""
    projection, shared = draw(*lead, 64, 64, seed=1) / 16, lead if measured == "alike" else ()
    some = draw(*shared, 64, 64, seed=4)
    encoder = make_encoder(projection, torch.float32, metric=some @ some.mT / 64, mean=draw(*shared, 64, seed=5))
    keys = draw(3, 2, 40, 64, seed=2)
    found, expected = pipeline.encode_with(encoder, keys), encode_with(encoder, keys)
    assert (found.codes != expected.codes).any(-1).sum() <= 2
    torch.testing.assert_close(found.error, expected.error, rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match="do not fit a projection of head_dim 64"):
        pipeline.encode_with(encoder, keys[..., :32])


FORMS = ("metric and mean", "each sequence's own", "neither gain nor error", "plain")
APPENDED = [  # dtype, head_dim, dimensions of a value, bits, form
    *((torch.float32, 64, 64, 64, form) for form in FORMS[:3]),
    *((torch.float16, 80, 80, 32, form) for form in FORMS[:3]),
    # Every other shape with two forms, so that every form meets every dtype or another shape of it.
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            (torch.float32, 64, 64, 64, FORMS[3]),
            *((torch.bfloat16, 128, 64, 128, FORMS[each]) for each in (0, 2)),
            *((torch.bfloat16, 256, 256, 64, FORMS[each]) for each in (1, 3)),
            *((torch.float32, 8, 16, 64, FORMS[each]) for each in (0, 3)),
            *((dtype, 64, 64, 64, FORMS[each]) for dtype in FLOAT64 for each in (0, 1)),
        )
    ),
]  # fmt: skip


def small_integers(*shape, most, seed):
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)


STEPS = [  # dtype, query heads per KV head, bits, rules; kept: whether gains and errors are
    (torch.bfloat16, 3, 64, {}),
    (torch.float32, 5, 32, {"safeguard": 0.5, "recent": 2, "sink": 1, "group": "max"}),
    pytest.param(torch.float16, 1, 128, {"kept": False, "group": "max"}, marks=pytest.mark.slow),  # as the others
]


@pytest.mark.emulated(form=["metric and mean"], bits=[32, 128])
@pytest.mark.emulated(form=["each sequence's own"], bits=[32])
@pytest.mark.emulated(form=["neither gain nor error"], dtype=[torch.float32], dim=[64])
@pytest.mark.parametrize(("dtype", "dim", "width", "bits", "form"), APPENDED)
def test_appends_a_token(dtype, dim, width, bits, form, pipeline):
    """Of numbers that every product and sum holds exactly, so that codes, gains and errors are equal bit for bit."""
    skip_unserved(pipeline, dtype)
    backend = importlib.import_module(pipeline.__name__.replace("pipeline", "backend"))
    batch, kv_heads, room = 2, 3, 21
    lead = (batch, kv_heads) if form == "each sequence's own" else (kv_heads,)
    projection = small_integers(*lead, bits, dim, most=3, seed=1).float() / 8
    metric = mean = None
    if form in ("metric and mean", "each sequence's own"):
        root = small_integers(*lead, dim, dim, most=1, seed=2).float() * (torch.rand(dim, device=DEVICE) < 0.1)
        metric, mean = root + root.mT + 8 * torch.eye(dim, device=DEVICE), projection[..., 0, :] * 8
    encoder = make_encoder(projection, dtype, metric=metric, mean=mean)
    keys = small_integers(batch, 4, kv_heads, dim, most=9, seed=3).to(dtype).transpose(1, 2)  # not contiguous
    keys[1, :, 2] = 0
    new_values = small_integers(batch, kv_heads, 4, width, most=9, seed=4).to(dtype)
    kept = form != "neither gain nor error"
    filled = []
    for module in (appending, backend):
        slots = Slots(
            keys=torch.full((batch, kv_heads, room + 3, dim), 7, dtype=dtype, device=DEVICE)[:, :, :room],
            values=torch.full((batch, room, kv_heads, width), 7, dtype=dtype, device=DEVICE).transpose(1, 2),
            codes=torch.full((batch, kv_heads, room, -(-bits // 64)), 7, device=DEVICE),
            gain=torch.full((batch, kv_heads, room), 7, dtype=torch.uint8, device=DEVICE) if kept else None,
            error=torch.full((batch, kv_heads, room), 7.0, device=DEVICE) if kept else None,
        )
        for step, place in enumerate((0, 20, 7, 8)):
            one = slice(step, step + 1)
            at = torch.tensor([place], device=DEVICE)
            module.append(encoder, keys[:, :, one], new_values[:, :, one], at, slots)
        filled.append(slots)
    for name, expected in vars(filled[0]).items():
        found = getattr(filled[1], name)
        assert found is expected is None or torch.equal(found, expected), name


@pytest.mark.parametrize(("dtype", "heads", "bits", "rules"), STEPS)
def test_a_whole_step_is_its_stages(dtype, heads, bits, rules, pipeline):
    """The same codes, gains and errors in the slots, bit for bit; and attention over the same tokens."""
    backend = importlib.import_module(pipeline.__name__.replace("pipeline", "backend"))
    batch, kv_heads, dim, length, k = 2, 3, 64, 150, 20
    projection = (draw(kv_heads, bits, dim, seed=1) / 16).to(dtype)
    some, rules = draw(dim, dim, seed=4), dict(rules)
    kept = rules.pop("kept", True)
    encoder = make_encoder(projection, dtype, metric=some @ some.mT / dim, mean=draw(kv_heads, dim, seed=5))
    keys, values = (draw(batch, kv_heads, room, dim, seed=2, dtype=dtype) for room in (160, 170))
    query, choice = draw(batch, kv_heads, heads, dim, seed=3, dtype=dtype), Choice(scaling=0.2, **rules)

    def hashed():
        encoded = encode_with(encoder, keys[:, :, : length - 1])
        filled = [torch.full((batch, kv_heads, 165, *each.shape[3:]), 7, dtype=each.dtype, device=DEVICE)
                  for each in (encoded.codes, encoded.gain, encoded.error)]  # fmt: skip
        for to, new in zip(filled, (encoded.codes, encoded.gain, encoded.error), strict=True):
            to[:, :, : length - 1] = new
        worst = worst_first(encoded.error) if choice.safeguard else None
        return Hashed(projection, encoder, Slots(keys, values, *(filled if kept else filled[:1])), length, worst)

    expected = hashed()
    stepping.store(backend.encode_with(encoder, keys[:, :, length - 1 : length]), expected)
    chosen = backend.choose(query, projection, stepping.cached(expected), k, choice)
    right = sparse_attention(query, keys[:, :, :length], values[:, :, :length], chosen, 0.2)
    within = {torch.bfloat16: 2e-2, torch.float16: 1e-3}.get(dtype, 1e-5)  # about one step of the dtype
    close = {"rtol": within, "atol": within}
    given = hashed()
    torch.testing.assert_close(backend.step(query, given, k, choice), right, **close)
    for name in ("codes", "gain", "error") if kept else ("codes",):
        assert torch.equal(getattr(given.slots, name), getattr(expected.slots, name)), name


def test_a_step_refuses_what_does_not_fit(pipeline):
    backend = importlib.import_module(pipeline.__name__.replace("pipeline", "backend"))
    projection, keys = draw(2, 64, 64), draw(1, 2, 9, 64)
    encoder, codes = make_encoder(projection, torch.float32), torch.zeros(1, 2, 9, 1, dtype=torch.int64, device=DEVICE)
    query, right = draw(1, 2, 4, 64), Slots(keys, keys, codes)
    for slots, length, k, fault in (
        (right, 9, 10, "k must be between 1 and the 9 cached tokens, not 10"),
        (right, 10, 3, "keys .* does not fit 10 tokens"),
        (Slots(keys, keys), 9, 3, "a step needs codes"),
        (Slots(keys, keys, codes.int()), 9, 3, "codes torch.int32"),
        (Slots(keys.half(), keys, codes), 9, 3, "query torch.float32 .* does not fit keys torch.float16"),
    ):
        with pytest.raises(InputError, match=fault):
            backend.step(query, Hashed(projection, encoder, slots, length), k, Choice(scaling=1.0))


@pytest.mark.emulated
def test_appends_without_codes(pipeline):
    backend = importlib.import_module(pipeline.__name__.replace("pipeline", "backend"))
    slots = Slots(torch.zeros(1, 2, 5, 64, device=DEVICE), torch.zeros(1, 2, 5, 64, device=DEVICE))
    key, value, place = draw(1, 2, 1, 64), draw(1, 2, 1, 64, seed=1), torch.tensor([3], device=DEVICE)
    backend.append(None, key, value, place, slots)
    assert torch.equal(slots.keys[:, :, 3:4], key)
    assert torch.equal(slots.values[:, :, 3:4], value)
    assert slots.keys.count_nonzero() == slots.values.count_nonzero() == 128
    with pytest.raises(InputError, match=r"append needs an encoder where there are codes"):
        backend.append(make_encoder(draw(2, 64, 64), torch.float32), key, value, place, slots)
    with pytest.raises(InputError, match=r"key torch.float32 \[1, 2, 1, 64\] does not fit its buffer"):
        backend.append(None, key, value, place, Slots(slots.keys.half(), slots.values))
    with pytest.raises(InputError, match=r"place must be integers \[1\]"):
        backend.append(None, key, value, torch.tensor(3, device=DEVICE), slots)
    codes = torch.zeros(1, 2, 5, 1, dtype=torch.int64, device=DEVICE)
    wide, narrow = (make_encoder(draw(2, bits, 64), torch.float32) for bits in (128, 64))
    with pytest.raises(InputError, match=r"codes"):
        backend.append(wide, key, value, place, Slots(slots.keys, slots.values, codes))
    kept = Slots(slots.keys, slots.values, codes, torch.zeros(1, 2, 5, device=DEVICE))
    with pytest.raises(InputError, match=r"gain torch.float32 \[1, 2, 5\] does not fit the keys' buffer"):
        backend.append(narrow, key, value, place, kept)


@pytest.mark.emulated(heads=[1, 5], dtype=[torch.float32, torch.bfloat16])
@pytest.mark.emulated(heads=[7], dtype=[torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [*FLOAT64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "k"),
    [
        (4, 128, 700, 100),
        (1, 64, 90, 1),
        (16, 256, 300, 300),
        (5, 80, 200, 65),
        (7, 96, 64, 64),
        (3, 72, 200, 131),
        (2, 8, 40, 20),
    ],
)
def test_attention_over_listed_tokens(dtype, heads, dim, tokens, k, pipeline):
    skip_unserved(pipeline, dtype)
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


@pytest.mark.emulated
def test_attention_over_nothing_is_zero(pipeline):
    query, keys = draw(2, 2, 4, 64), draw(2, 2, 50, 64, seed=1)
    indices = torch.full((2, 2, 5), -1, device=DEVICE)
    indices[0] = torch.arange(5)
    found, expected = (
        pipeline.sparse_attention(query, keys, keys, indices),
        sparse_attention(query, keys, keys, indices),
    )
    assert (found[1] == 0).all()
    torch.testing.assert_close(found, expected, rtol=EXACT[torch.float32], atol=EXACT[torch.float32])


def test_no_tokens(both):
    """Only a list that is wider than the number of tokens."""
    codes = torch.empty(1, 2, 0, 1, dtype=torch.int64, device=DEVICE)
    encoded = Encoded(codes, None, None)
    valid, projection = torch.ones(1, 0, dtype=torch.bool, device=DEVICE), draw(2, 64, 64, seed=1)
    rules = {"gain": False, "group": "max", "recent": 1, "valid": valid, "width": 4}
    found, _ = both(draw(1, 2, 4, 64), projection, encoded, 0, **rules)
    assert found.tolist() == [[[-1] * 4] * 2]


def test_a_length_beyond_the_buffer_is_the_buffer(both):
    projection, encoded = cache(1, 2, 60, 64, 64)
    query, lengths = draw(1, 2, 4, 64, seed=3), torch.tensor([75], device=DEVICE)
    found, expected = both(query, projection, encoded, 9, lengths=lengths)
    assert torch.equal(found, expected)
