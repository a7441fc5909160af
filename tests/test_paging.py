"""What is cached in pages: plain torch against what was written, and the kernels of a CPU over packed values."""

from dataclasses import replace

import pytest
import torch

from bpc_calib import InputError
from bpc_calib.backends import plain
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State, read_codes, read_tokens, within, write_codes

native = pytest.importorskip("bpc_calib.backends.cpu.backend")

SIZE, HEADS, PAGES, DIM = 32, 3, 9, 20
WORDS = ("words", [1, 2])
DTYPES = ("dtype", [torch.float32, torch.bfloat16, torch.float16])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pages(words=1, count=PAGES, behind=64, cache=None, **more):
    """Pages of keys and values, or of zeros, whose codes and gains are sevens; `behind`: other bytes between them."""
    room = HEADS * SIZE * (8 * words + 1) + behind
    raw = torch.full((count * room,), 7, dtype=torch.uint8)
    codes = raw.view(torch.int64).as_strided((count, HEADS, SIZE, words), (room // 8, SIZE * words, words, 1))
    gain = raw.as_strided((count, HEADS, SIZE), (room, SIZE, 1), HEADS * SIZE * words * 8)
    cache = torch.zeros(count, HEADS, SIZE, 2 * DIM) if cache is None else cache
    keys, values = cache.chunk(2, -1)
    if cache.dim() == 3:
        keys, values = keys.unflatten(-1, (SIZE, DIM)), cache
    return State(keys, values, codes, gain, **more)


def rows_of(table, lengths, k=1):
    """Sequences of so many tokens; behind the pages of each its table holds nonsense."""
    table, lengths = torch.tensor(table, dtype=torch.int32), torch.tensor(lengths)
    for row, length in zip(table, lengths.tolist(), strict=True):
        row[-(-length // SIZE) :] = 1 << 30
    k = torch.as_tensor(k).expand(len(lengths)).unsqueeze(1)
    return Rows(lengths, k, int(lengths.max()), int(k.max()), block_table=table)


def encoded(tokens, words):
    codes = torch.randint(-(1 << 62), 1 << 62, (1, HEADS, tokens, words), generator=generator(tokens))
    gain = torch.randint(256, (1, HEADS, tokens), generator=generator(tokens), dtype=torch.uint8)
    return Encoded(codes, torch.zeros(1, HEADS, tokens), gain)


def packed():
    """Numbers of the values in any order, behind the keys of a page."""
    return SIZE * DIM + torch.randperm(SIZE * DIM, generator=generator(1)).view(SIZE, DIM)


@pytest.mark.parametrize("behind", [0, 64])
@pytest.mark.parametrize(*WORDS)
def test_what_is_written_to_slots_is_read_in_order(words, behind):
    """Of two sequences of 70 and 33 tokens, whose pages lie in any order."""
    state, rows = pages(words, behind=behind), rows_of([[4, 0, 7], [2, 8, 99]], [70, 33])
    written = [encoded(length, words) for length in (70, 33)]
    for table, each in zip(rows.block_table.long(), written, strict=True):
        slots = (table[:, None] * SIZE + torch.arange(SIZE)).flatten()
        write_codes(each, slots[: each.codes.shape[2]], state)
    codes, gain = read_codes(state, rows)
    assert codes.shape == (2, HEADS, 70, words)
    for b, each in enumerate(written):
        tokens = each.codes.shape[2]
        assert torch.equal(codes[b, :, :tokens], each.codes[0])
        assert torch.equal(gain[b, :, :tokens], each.gain[0])
    untouched = [page for page in range(PAGES) if page not in (4, 0, 7, 2, 8)]
    assert (state.gain[untouched] == 7).all()
    assert (state.gain[8, :, 1:] == 7).all()


@pytest.mark.parametrize(*WORDS)
def test_tokens_without_a_slot_are_not_written(words):
    state = pages(words)
    write_codes(each := encoded(4, words), torch.tensor([5, -1, 40, -1]), state)
    assert torch.equal(state.codes[0, :, 5], each.codes[0, :, 0])
    assert torch.equal(state.gain[1, :, 8], each.gain[0, :, 2])
    assert (state.gain != 7).sum() + (each.gain[0, :, [0, 2]] == 7).sum() == 2 * HEADS
    write_codes(encoded(0, words), torch.zeros(0, dtype=torch.int64), state)


def test_chosen_tokens_are_unpacked():
    """From pages of numbers in any order, between other bytes."""
    wide = torch.randn(PAGES, HEADS * 2 * SIZE * DIM + 10, generator=generator())
    state = pages(cache=wide[:, :-10].unflatten(1, (HEADS, -1)), values_at=packed())
    rows, indices = rows_of([[4, 0, 7], [2, 8, 1]], [96, 96]), torch.randint(96, (2, HEADS, 11), generator=generator())
    indices[1, :, 8:] = -1
    token = int(indices[1, 2, 3])
    page = int(rows.block_table[1, token // SIZE])
    found, at_0 = read_tokens(state, rows, indices), read_tokens(state, rows, 0 * indices)
    assert torch.equal(found[0][1, 2, 3], state.keys[page, 2, token % SIZE])
    assert torch.equal(found[1][1, 2, 3], state.values[page, 2, state.values_at[token % SIZE]])
    assert all(torch.equal(each[1, :, 8:], first[1, :, 8:]) for each, first in zip(found, at_0, strict=True))


def test_chosen_tokens_of_rows_and_of_8_bits():
    """A key and then its value in a row, with heads and places in another order in memory; and the same in FP8."""
    cache = torch.randn(PAGES, SIZE, HEADS, 2 * DIM, generator=generator()).transpose(1, 2)
    rows, indices = rows_of([[4, 0]], [64]), torch.tensor([[[3, 40, -1]]]).expand(1, HEADS, 3)
    keys, values = read_tokens(pages(cache=cache), rows, indices)
    assert torch.equal(keys[0, 1], cache[[4, 0, 4], 1, [3, 8, 0], :DIM])
    assert torch.equal(values[0, 2], cache[[4, 0, 4], 2, [3, 8, 0], DIM:])
    small = pages(cache=cache.to(torch.float8_e4m3fn), scales=(torch.tensor([0.5]), torch.tensor([3.0])))
    found = read_tokens(small, rows, indices)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], keys * 0.5, rtol=2**-4, atol=2**-10)
    torch.testing.assert_close(found[1], values * 3, rtol=2**-4, atol=2**-7)


@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 20])
@pytest.mark.parametrize(*DTYPES)
def test_keys_are_hashed_into_their_slots(tokens, metric, dtype):
    """In one kernel for few keys: the codes of each key alone, and nothing else is written."""
    codebook = make_codebook(
        torch.randn(HEADS, 32, DIM, generator=generator(1)),
        dtype,
        metric=torch.eye(DIM).expand(HEADS, DIM, DIM) * 1.5 if metric else None,
        mean=torch.randn(HEADS, DIM, generator=generator(2)) if metric else None,
    )
    keys = torch.randn(1, tokens, HEADS, DIM, generator=generator(tokens)).to(dtype).transpose(1, 2)
    slots = torch.randperm(PAGES * SIZE, generator=generator())[:tokens]
    if tokens > 1:
        slots[1] = -1
    wanted, found = pages(), pages()
    for i in range(tokens):
        write_codes(native.encode_with(codebook, keys[:, :, i : i + 1]), slots[i : i + 1], wanted)
    native.append(found, codebook, keys, None, slots)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.gain, wanted.gain)


@pytest.mark.parametrize("backend", [plain, native], ids=["torch", "native"])
@pytest.mark.parametrize("tokens", [1, 8, 20])
@pytest.mark.parametrize(*DTYPES)
def test_copied_keys_are_written_with_their_codes(tokens, dtype, backend):
    """Into rows between other bytes; the values are a server's."""
    codebook = make_codebook(torch.randn(HEADS, 64, DIM, generator=generator(1)), dtype)
    keys = torch.randn(1, tokens, HEADS, DIM, generator=generator(tokens)).to(dtype).transpose(1, 2)
    slots = torch.randperm(PAGES * SIZE, generator=generator())[:tokens]
    if tokens > 1:
        slots[1] = -1
    cache = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM, dtype=dtype)
    copied, coded = pages(cache=cache, copied=True), pages(cache=cache.clone())
    backend.append(copied, codebook, keys, None, slots)
    backend.append(coded, codebook, keys, None, slots)
    assert torch.equal(copied.codes, coded.codes)
    assert not coded.keys.any()
    assert not cache[..., DIM:].any()
    kept = slots[slots >= 0]
    found = copied.keys[kept // SIZE, :, kept % SIZE]
    assert torch.equal(found, keys[0].transpose(0, 1)[slots >= 0])
    assert int(copied.keys.any(-1).sum()) == HEADS * len(kept)
    for wrong in (keys[..., 1:], keys.double()):
        with pytest.raises(InputError, match=r"key .* does not fit its buffer"):
            backend.append(copied, codebook, wrong, None, slots)


@pytest.mark.parametrize(*DTYPES)
@pytest.mark.parametrize(
    ("lengths", "k", "heads", "rules"),
    [
        ((70, 33), (9, 33), 3, {}),
        ((90, 96, 1), (9, 11, 1), 5, {"recent": 4, "sink": 2}),
        ((64,), (5,), 1, {"group": "max"}),
        ((300, 280, 31, 32, 250, 33, 288), (20, 1, 3, 32, 30, 8, 13), 4, {"group": "max", "recent": 1}),
    ],
    ids=["two", "three", "one", "seven"],
)
@pytest.mark.parametrize(("words", "gain"), [(1, True), (1, False), (2, True)])
def test_a_step_over_packed_values_is_a_step_over_rows(lengths, k, heads, rules, words, gain, dtype):
    """The tokens and bits that the kernels find in the same codes, keys and values in rows, also on two threads."""
    batch, per_sequence = len(lengths), -(-max(lengths) // SIZE)
    rows = rows_of(
        torch.randperm(batch * per_sequence, generator=generator()).view(batch, -1).tolist(), lengths, torch.tensor(k)
    )
    cache = torch.randn(batch * per_sequence, HEADS, 2 * SIZE * DIM, generator=generator()).to(dtype)
    state = pages(words, len(cache), cache=cache, values_at=packed())
    state.codes.random_(-(1 << 62), 1 << 62, generator=generator(3))
    state.gain.random_(0, 256, generator=generator(4))
    query = torch.randn(batch, HEADS, heads, DIM, generator=generator(5)).to(dtype)
    codebook = make_codebook(torch.randn(HEADS, 64 * words, DIM, generator=generator(6)), dtype)
    rules = Rules(scaling=0.3, gain=gain, **rules)
    every = torch.arange(rows.longest).where(within(rows), -1).unsqueeze(1).expand(-1, HEADS, -1)
    copies = State(*read_tokens(state, rows, every), *read_codes(state, rows))
    wanted = native.sparse_decode(query, codebook, copies, replace(rows, block_table=None), rules)
    threads = torch.get_num_threads()
    for used in (1, 2):
        torch.set_num_threads(used)
        found = native.sparse_decode(query, codebook, state, rows, rules)
        torch.set_num_threads(threads)
        assert all(map(torch.equal, found, wanted))
    exact, same = plain.sparse_decode(query, codebook, state, rows, rules)
    if torch.equal(same, wanted[1]):  # unless the int8 queries round differently
        torch.testing.assert_close(found[0], exact, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=0)


@pytest.mark.parametrize("dim", [16, 48])
@pytest.mark.parametrize(*DTYPES)
def test_a_step_over_pairs_of_values_is_a_step_over_rows(dtype, dim, monkeypatch):
    """In vLLM's packing for AMX runs of 16 numbers of one value lie between those of the next, or of the one before."""
    monkeypatch.setitem(globals(), "DIM", dim)
    place, number = torch.arange(SIZE).unsqueeze(1), torch.arange(dim)
    at = SIZE * dim + number // 16 * SIZE * 16 + place // 2 * 32 + number % 16 * 2 + place % 2
    rows = rows_of([[4, 0, 7], [2, 8, 5]], [70, 33], torch.tensor([40, 33]))
    cache = torch.randn(PAGES, HEADS, 2 * SIZE * dim, generator=generator()).to(dtype)
    state = pages(cache=cache, values_at=at)
    query = torch.randn(2, HEADS, 3, dim, generator=generator(5)).to(dtype)
    codebook = make_codebook(torch.randn(HEADS, 64, dim, generator=generator(6)), dtype)
    every = torch.arange(rows.longest).where(within(rows), -1).unsqueeze(1).expand(-1, HEADS, -1)
    copies = State(*read_tokens(state, rows, every), *read_codes(state, rows))
    wanted = native.sparse_decode(query, codebook, copies, replace(rows, block_table=None), Rules())
    assert all(map(torch.equal, native.sparse_decode(query, codebook, state, rows, Rules()), wanted))
    assert torch.equal(native.attend(query, state, rows, wanted[1]), wanted[0])


@pytest.mark.parametrize("size", [32, 48])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_a_long_sequence_in_pages(threads, size, monkeypatch):
    """The parts of a sequence begin within pages, too."""
    monkeypatch.setitem(globals(), "SIZE", size)
    length = 20_000 + size // 2
    rows = rows_of([torch.randperm(length // size + 1, generator=generator()).tolist()], [length], 900)
    state = pages(1, rows.block_table.numel())
    for each in (state.keys, state.values):
        each.normal_(generator=generator(1))
    state.codes.random_(-(1 << 62), 1 << 62, generator=generator(3))
    state.gain.random_(0, 256, generator=generator(4))
    query = torch.randn(1, HEADS, 2, DIM, generator=generator(5))
    codebook = make_codebook(torch.randn(HEADS, 64, DIM, generator=generator(6)), torch.float32)
    every = torch.arange(length).expand(1, HEADS, -1)
    copies = State(*read_tokens(state, rows, every), *read_codes(state, rows))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    wanted = native.sparse_decode(query, codebook, copies, replace(rows, block_table=None), Rules())
    found = native.sparse_decode(query, codebook, state, rows, Rules())
    torch.set_num_threads(before)
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(
        found[1], plain.sparse_decode(query, codebook, copies, replace(rows, block_table=None), Rules())[1]
    )


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("times", [1, 10])
@pytest.mark.parametrize("backend", [plain, native], ids=["torch", "native"])
@pytest.mark.parametrize(*DTYPES)
def test_a_step_hashes_the_newest_keys_first(dtype, backend, times, copied):
    """Those that a server has just written to the ends of its sequences, as `append` does before a step.

    Of many sequences the kernels hash the keys of a head together, of few in the order of the sequences.
    """
    lengths, ks, count = (70, 33, 64, 1) * times, torch.tensor([9, 5, 64, 1]).repeat(times), 12 * times
    rows = rows_of(torch.randperm(count, generator=generator()).view(-1, 3).tolist(), lengths, ks)
    cache = torch.randn(count, HEADS, SIZE, 2 * DIM, generator=generator(1)).to(dtype)
    once, twice = (pages(1, count, cache=each, copied=copied) for each in (cache, cache.clone()))
    codebook = make_codebook(
        torch.randn(HEADS, 64, DIM, generator=generator(2)),
        dtype,
        metric=torch.eye(DIM).expand(HEADS, DIM, DIM) * 1.5,
        mean=torch.randn(HEADS, DIM, generator=generator(3)),
    )
    query = torch.randn(4 * times, HEADS, 2, DIM, generator=generator(4)).to(dtype)
    key = torch.randn(4 * times, HEADS, DIM, generator=generator(5)).to(dtype)
    slots = torch.tensor([
        int(table[(length - 1) // SIZE]) * SIZE + (length - 1) % SIZE
        for table, length in zip(rows.block_table, lengths, strict=True)
    ])  # fmt: skip
    backend.append(twice, codebook, key.transpose(0, 1).unsqueeze(0), None, slots)
    wanted = backend.sparse_decode(query, codebook, twice, rows, Rules())
    out = query.flatten(1, 2) * torch.nan, wanted[1] - 5
    found = backend.sparse_decode(query, codebook, once, rows, Rules(), key=key, out=out)
    assert found is out
    assert all(torch.equal(*pair) for pair in zip((found[0].view(query.shape), found[1]), wanted, strict=True))
    for name in ("keys", "codes", "gain"):
        assert torch.equal(getattr(once, name), getattr(twice, name))
    assert int((once.codes != pages(1, count).codes).sum()) == 4 * HEADS * times
    none, empty = replace(rows, k=rows.k * 0, width=0), pages(1, count, cache=cache.clone(), copied=copied)
    nothing, _ = backend.sparse_decode(query, codebook, empty, none, Rules(), key=key)
    assert not nothing.any()
    assert torch.equal(empty.codes, twice.codes)


@pytest.mark.parametrize("backend", [plain, native], ids=["torch", "native"])
def test_what_does_not_fit_is_refused(backend):
    where = torch.zeros(SIZE, DIM, dtype=torch.int64)
    state = pages(cache=torch.zeros(PAGES, HEADS, 2 * SIZE * DIM), values_at=where)
    query, codebook = torch.zeros(2, HEADS, 1, DIM), make_codebook(torch.ones(HEADS, 64, DIM), torch.float32)
    rows = rows_of([[0, 0, 0]] * 2, [1, 2])
    given = {"query": query, "codebook": codebook, "state": state, "rows": rows}
    assert backend.sparse_decode(**given, rules=Rules())[1].shape == (2, HEADS, 1)
    listed = torch.zeros(2, HEADS, 1, dtype=torch.int64)
    table, narrow = rows.block_table, make_codebook(torch.ones(HEADS, 64, 4), torch.float32)
    for wrong, said in (
        ({"query": query.bfloat16()}, "keys torch.float32 .* do not fit query torch.bfloat16"),
        ({"query": query[:1]}, r"lengths must be integers \[1\]"),
        ({"codebook": codebook.change(lambda each: each[:2])}, "projection .* does not fit query"),
        ({"codebook": narrow}, "projection .* does not fit query"),
        ({"codebook": make_codebook(codebook.projection, torch.bfloat16)}, "a codebook for torch.bfloat16 does not"),
        ({"rows": replace(rows, k=rows.k[:1])}, "k must be integers"),
        ({"rows": replace(rows, block_table=table.long())}, r"block_table must be int32 \[2, P\]"),
        ({"rows": replace(rows, block_table=table[:1])}, r"block_table must be int32 \[2, P\]"),
        ({"rows": replace(rows, longest=97)}, "3 pages of 32 tokens do not fit 1 of 97 tokens"),
        ({"rows": replace(rows, valid=torch.ones(2, 2, dtype=torch.bool))}, "pages take no padding"),
        ({"fresh": 1}, "pages take no padding, no fresh tokens"),
        ({"key": query[:, :, 0].bfloat16()}, r"the newest keys must be torch.float32 \[2, 3, 20\] of pages, not"),
        ({"key": query}, r"the newest keys must be .* not torch.float32 \[2, 3, 1, 20\]"),
        ({"key": query[:1, :, 0]}, r"the newest keys must be .* not torch.float32 \[1, 3, 20\]"),
        ({"out": (query[:1], listed)}, r"attention needs contiguous torch.float32 \[2, 3, 1, 20\] in `out`"),
        ({"out": (query, listed[..., :0])}, r"tokens need contiguous torch.int64 \[2, 3, 1\] in `out`"),
        ({"state": replace(state, worst=state.gain.int())}, "pages take no padding, no fresh tokens and no safeguard"),
        ({"state": replace(state, values_at=where[:, 1:])}, "values at .* do not fit pages of 32"),
        ({"state": replace(state, gain=state.gain[:, :, 1:])}, "gain .* do not fit query"),
        ({"state": pages(cache=torch.zeros(PAGES, HEADS, SIZE, 2 * DIM).half())}, "keys torch.float16 .* do not fit"),
    ):
        with pytest.raises(InputError, match=said):
            backend.sparse_decode(**(given | wrong), rules=Rules())
