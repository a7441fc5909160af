"""Codes, keys and values in pages: plain torch against rows of memory, and the compiled kernels against plain torch."""

from dataclasses import replace

import pytest
import torch

from bpc_calib import InputError
from bpc_calib.backends import plain
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.paging import CodePages, Fresh, Packing, Paged, Rows, read_codes, read_tokens, write_codes

native = pytest.importorskip("bpc_calib.backends.cpu.backend")

SIZE, HEADS, PAGES = 32, 3, 9
DIMS = ("words", [1, 2])
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in (torch.bfloat16, torch.float16)]  # 50 s to compile
DTYPES = ("dtype", [torch.float32, *OTHERS])


def empty_pages(words: int, behind: int = 0) -> CodePages:
    """Pages full of sevens; `behind`: bytes of other things between them, as in a server's cache."""
    room = HEADS * SIZE * (8 * words + 1) + behind
    raw = torch.full((PAGES * room,), 7, dtype=torch.uint8)
    codes = raw.view(torch.int64).as_strided((PAGES, HEADS, SIZE, words), (room // 8, SIZE * words, words, 1))
    gain = raw.as_strided((PAGES, HEADS, SIZE), (room, SIZE, 1), HEADS * SIZE * words * 8)
    return CodePages(codes, gain)


def encoded(tokens: int, words: int) -> Encoded:
    generator = torch.Generator().manual_seed(tokens)
    low, high = -(1 << 62), 1 << 62
    codes = torch.randint(low, high, (1, HEADS, tokens, words), generator=generator)
    gain = torch.randint(256, (1, HEADS, tokens), generator=generator, dtype=torch.uint8)
    return Encoded(codes, torch.zeros(1, HEADS, tokens), gain)


@pytest.mark.parametrize("behind", [0, 64])
@pytest.mark.parametrize(*DIMS)
def test_what_is_written_to_slots_is_read_in_order(words, behind):
    """Of two sequences of 70 and 33 tokens, whose pages lie in any order; behind them the tables hold nonsense."""
    pages, table = empty_pages(words, behind), torch.tensor([[4, 0, 7], [2, 8, 99]], dtype=torch.int32)
    lengths, places = torch.tensor([70, 33]), torch.arange(96)
    written = [encoded(length, words) for length in lengths.tolist()]
    for row, each in zip(table, written, strict=True):
        tokens = each.codes.shape[2]
        slots = (row.long()[:, None] * SIZE + torch.arange(SIZE)).flatten()[:tokens]
        write_codes(each, slots, pages)
    codes, gain = read_codes(pages, table, lengths)
    for b, each in enumerate(written):
        assert torch.equal(codes[b][:, places < lengths[b]], each.codes[0])
        assert torch.equal(gain[b][:, places < lengths[b]], each.gain[0])
    untouched = [page for page in range(PAGES) if page not in (4, 0, 7, 2, 8)]
    assert (pages.gain[untouched] == 7).all()
    assert (pages.gain[8, :, 1:] == 7).all()


@pytest.mark.parametrize(*DIMS)
def test_tokens_without_a_slot_are_not_written(words):
    pages, slots = empty_pages(words), torch.tensor([5, -1, 40, -1])
    write_codes(each := encoded(4, words), slots, pages)
    assert torch.equal(pages.codes[0, :, 5], each.codes[0, :, 0])
    assert torch.equal(pages.gain[1, :, 8], each.gain[0, :, 2])
    assert (pages.gain != 7).sum() + (each.gain[0, :, [0, 2]] == 7).sum() == 2 * HEADS


def test_chosen_tokens_are_unpacked():
    """From pages of numbers in any order, between other bytes."""
    generator, dim = torch.Generator().manual_seed(0), 20
    where = torch.randperm(2 * SIZE * dim, generator=generator).view(2, SIZE, dim)
    wide = torch.randn(PAGES, HEADS * 2 * SIZE * dim + 10, generator=generator)
    cache = wide[:, : HEADS * 2 * SIZE * dim].unflatten(1, (HEADS, -1))
    table = torch.tensor([[4, 0, 7], [2, 8, 1]], dtype=torch.int32)
    indices = torch.randint(96, (2, HEADS, 11), generator=generator)
    indices[1, :, 8:] = -1
    both = read_tokens(Paged(empty_pages(1), cache, Packing(*where)), table, indices)
    token = int(indices[1, 2, 3])
    page = cache[table[1, token // SIZE].item(), 2]
    for found, at in zip(both, where, strict=True):
        assert torch.equal(found[1, 2, 3], page[at[token % SIZE]])
        assert (found[1, :, 8:] == 0).all()


def test_chosen_tokens_of_rows_and_of_8_bits():
    """A key and then its value in a row, with heads and places in another order in memory; and the same in FP8."""
    generator, dim = torch.Generator().manual_seed(0), 20
    cache = torch.randn(PAGES, SIZE, HEADS, 2 * dim, generator=generator).transpose(1, 2)
    table, indices = torch.tensor([[4, 0]], dtype=torch.int32), torch.tensor([[[3, 40, -1]]]).expand(1, HEADS, 3)
    keys, values = read_tokens(Paged(empty_pages(1), cache), table, indices)
    assert torch.equal(keys[0, 1, :2], torch.stack([cache[4, 1, 3, :dim], cache[0, 1, 8, :dim]]))
    assert torch.equal(values[0, 2, :2], torch.stack([cache[4, 2, 3, dim:], cache[0, 2, 8, dim:]]))
    assert (keys[:, :, 2] == 0).all()
    scales = torch.tensor([0.5]), torch.tensor([3.0])
    small = Paged(empty_pages(1), cache.to(torch.float8_e4m3fn), scales=scales)
    found = read_tokens(small, table, indices)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], keys * 0.5, rtol=2**-4, atol=2**-10)
    torch.testing.assert_close(found[1], values * 3, rtol=2**-4, atol=2**-7)


@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 20])
@pytest.mark.parametrize(*DTYPES)  # last: so all of one dtype come first, whose kernels other tests wait for
def test_keys_are_hashed_into_their_slots(tokens, metric, dtype):
    """Compiled as one kernel for few keys: the codes of each key alone."""
    generator, dim, bits = torch.Generator().manual_seed(tokens), 20, 32
    encoder = make_encoder(
        torch.randn(HEADS, bits, dim, generator=generator),
        dtype,
        metric=torch.eye(dim).expand(HEADS, dim, dim) * 1.5 if metric else None,
        mean=torch.randn(HEADS, dim, generator=generator) if metric else None,
    )
    keys = torch.randn(1, tokens, HEADS, dim, generator=generator).to(dtype).transpose(1, 2)
    slots = torch.randperm(PAGES * SIZE, generator=generator)[:tokens]
    if tokens > 1:
        slots[1] = -1
    wanted, found = empty_pages(1), empty_pages(1)
    one_by_one = [native.encode_with(encoder, keys[:, :, i : i + 1]) for i in range(tokens)]
    for i, each in enumerate(one_by_one):
        write_codes(each, slots[i : i + 1], wanted)
    native.hash_into(Fresh(encoder, keys, slots), found)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.gain, wanted.gain)


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
def test_a_step_over_pages_is_a_step_over_rows(lengths, k, heads, rules, words, gain, dtype):
    """The tokens are those that the compiled `choose` takes from the same codes in rows, also on two threads."""
    generator, batch, size, dim = torch.Generator().manual_seed(len(lengths)), len(lengths), SIZE, 20
    per_sequence = -(-max(lengths) // size)
    count = batch * per_sequence
    room = HEADS * size * (8 * words + 1) + 64
    raw = torch.randint(256, (count * room,), generator=generator, dtype=torch.uint8)
    codes = raw.view(torch.int64).as_strided((count, HEADS, size, words), (room // 8, size * words, words, 1))
    gains = raw.as_strided((count, HEADS, size), (room, size, 1), HEADS * size * words * 8)
    places = torch.randperm(2 * size * dim, generator=generator).view(2, size, dim)
    cache = torch.randn(count, HEADS, 2 * size * dim, generator=generator).to(dtype)
    table = torch.randperm(count, generator=generator).int().view(batch, per_sequence)
    paged = Paged(CodePages(codes, gains), cache, Packing(*places))
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // size) :] = 1 << 30  # a page that is not read
    query = torch.randn(batch, HEADS, heads, dim, generator=generator).to(dtype)
    projection = torch.randn(HEADS, 64 * words, dim, generator=generator).to(dtype)
    choice, rows = Choice(0.3, **rules), Rows(table, torch.tensor(lengths), torch.tensor(k), max(k))
    copied, weights = read_codes(paged.codes, table, rows.lengths)
    cached = Cached(copied, weights if gain else None, lengths=rows.lengths)
    wanted = native.choose(query, projection, cached, rows.k.unsqueeze(-1), choice, width=rows.width)
    threads = torch.get_num_threads()
    for used in (1, 2):
        torch.set_num_threads(used)
        out, chosen = native.attend_pages(query, projection, paged, rows, choice, gain=gain)
        torch.set_num_threads(threads)
        assert torch.equal(chosen, wanted)
    keys, values = read_tokens(paged, table, wanted)
    listed = torch.arange(rows.width).expand_as(wanted).where(wanted >= 0, -1)
    assert torch.equal(out, native.sparse_attention(query, keys, values, listed, choice.scaling))
    exact, same = plain.attend_pages(query, projection, paged, rows, choice, gain=gain)
    if torch.equal(same, wanted):  # unless the int8 queries round differently
        torch.testing.assert_close(out, exact, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=0)


@pytest.mark.parametrize("new", [1, 5, 20])
@pytest.mark.parametrize("backend", [plain, native], ids=["torch", "native"])
def test_new_keys_are_hashed_before_the_choice(backend, new):
    """In one call what two calls do; the keys that are new are among those that are ranked."""
    generator, dim = torch.Generator().manual_seed(new), 16
    projection = torch.randn(HEADS, 64, dim, generator=generator)
    encoder = make_encoder(projection, torch.float32)
    keys = torch.randn(1, HEADS, new, dim, generator=generator)
    fresh, where = Fresh(encoder, keys, torch.arange(new) + 2 * SIZE), torch.arange(2 * SIZE * dim).view(2, SIZE, dim)
    rows = Rows(torch.tensor([[5, 2]], dtype=torch.int32), torch.tensor([SIZE + new]), torch.tensor([9]), 9)
    cache = torch.randn(PAGES, HEADS, 2 * SIZE * dim, generator=generator)
    query = torch.randn(1, HEADS, 2, dim, generator=generator)
    choice = Choice(0.25)
    found = []
    for at_once in (True, False):
        paged = Paged(empty_pages(1), cache, Packing(*where))
        if not at_once:
            backend.hash_into(fresh, paged.codes)
        given = fresh if at_once else None
        found.append((*backend.attend_pages(query, projection, paged, rows, choice, fresh=given), paged.codes))
    (out, chosen, codes), (out_2, chosen_2, codes_2) = found
    assert torch.equal(out, out_2)
    assert torch.equal(chosen, chosen_2)
    assert torch.equal(codes.codes, codes_2.codes)
    assert torch.equal(codes.gain, codes_2.gain)
    assert (codes.gain[2, :, :new] != 7).any()
    assert (codes.gain[2, :, new:] == 7).all()


def test_wrong_shapes_are_refused():
    pages, table = empty_pages(1), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(InputError, match=r"table must be int32 \[B, P\] and lengths \[B\]"):
        read_codes(pages, table.long(), torch.tensor([1, 2]))
    assert read_codes(pages, table, torch.tensor([1, 2]))[0].shape == (2, HEADS, 96, 1)
    write_codes(encoded(0, 1), torch.zeros(0, dtype=torch.int64), pages)
    where = torch.zeros(SIZE, 8, dtype=torch.int64)
    paged = Paged(pages, torch.zeros(PAGES, HEADS, 2 * SIZE * 8), Packing(where, where))
    query, projection = torch.zeros(2, HEADS, 1, 8), torch.zeros(HEADS, 64, 8)
    rows = Rows(table, torch.tensor([1, 2]), torch.tensor([1, 1]), 1)
    for backend in (plain, native):
        for wrong in (
            (query.bfloat16(), projection, paged, rows), (query, projection[:2], paged, rows),
            (query[:1], projection, paged, rows), (query, projection, paged, replace(rows, k=rows.k[:1])),
            (query, projection[..., :4], paged, rows), (query, projection.bfloat16(), paged, rows),
        ):  # fmt: skip
            with pytest.raises(InputError, match="do not fit a cache of pages"):
                backend.attend_pages(*wrong, Choice(1.0))
