"""Codes, keys and values in pages: plain torch against rows of memory, and the compiled kernels against plain torch."""

import pytest
import torch

from bpc_calib import InputError
from bpc_calib.backends import plain
from bpc_calib.method.encoding import Encoded
from bpc_calib.method.paging import CodePages, read_codes, read_tokens, write_codes

numba = pytest.importorskip("bpc_calib.backends.cpu.backend")

SIZE, HEADS, PAGES = 32, 3, 9
DIMS = ("words", [1, 2])


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
@pytest.mark.parametrize("backend", [plain, numba], ids=["torch", "numba"])
def test_what_is_written_to_slots_is_read_in_order(backend, words, behind):
    """Of two sequences of 70 and 33 tokens, whose pages lie in any order; behind them the tables hold nonsense."""
    pages, table = empty_pages(words, behind), torch.tensor([[4, 0, 7], [2, 8, 99]], dtype=torch.int32)
    lengths, places = torch.tensor([70, 33]), torch.arange(96)
    written = [encoded(length, words) for length in lengths.tolist()]
    for row, each in zip(table, written, strict=True):
        tokens = each.codes.shape[2]
        slots = (row.long()[:, None] * SIZE + torch.arange(SIZE)).flatten()[:tokens]
        backend.write_codes(each, slots, pages)
    codes, gain = backend.read_codes(pages, table, lengths)
    for b, each in enumerate(written):
        assert torch.equal(codes[b][:, places < lengths[b]], each.codes[0])
        assert torch.equal(gain[b][:, places < lengths[b]], each.gain[0])
    untouched = [page for page in range(PAGES) if page not in (4, 0, 7, 2, 8)]
    assert (pages.gain[untouched] == 7).all()
    assert (pages.gain[8, :, 1:] == 7).all()


@pytest.mark.parametrize(*DIMS)
@pytest.mark.parametrize("backend", [plain, numba], ids=["torch", "numba"])
def test_tokens_without_a_slot_are_not_written(backend, words):
    pages, slots = empty_pages(words), torch.tensor([5, -1, 40, -1])
    backend.write_codes(each := encoded(4, words), slots, pages)
    assert torch.equal(pages.codes[0, :, 5], each.codes[0, :, 0])
    assert torch.equal(pages.gain[1, :, 8], each.gain[0, :, 2])
    assert (pages.gain != 7).sum() + (each.gain[0, :, [0, 2]] == 7).sum() == 2 * HEADS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chosen_tokens_are_unpacked(dtype):
    """From pages of keys in any order of their numbers, between other bytes: the same in plain torch and compiled."""
    generator, dim = torch.Generator().manual_seed(0), 20
    where = torch.randperm(2 * SIZE * dim, generator=generator)[: SIZE * dim].view(SIZE, dim)
    wide = torch.randn(PAGES, HEADS * 2 * SIZE * dim + 10, generator=generator).to(dtype)
    cache = wide[:, : HEADS * 2 * SIZE * dim].unflatten(1, (HEADS, -1))
    table = torch.tensor([[4, 0, 7], [2, 8, 1]], dtype=torch.int32)
    indices = torch.randint(96, (2, HEADS, 11), generator=generator)
    indices[1, :, 8:] = -1
    found = read_tokens(cache, where, table, indices)
    assert torch.equal(numba.read_tokens(cache, where, table, indices), found)
    token = int(indices[1, 2, 3])
    page = cache[table[1, token // SIZE].item(), 2]
    assert torch.equal(found[1, 2, 3], page[where[token % SIZE]])
    assert (found[1, :, 8:] == 0).all()


def test_wrong_shapes_are_refused():
    pages, table = empty_pages(1), torch.zeros(2, 3, dtype=torch.int32)
    for backend in (plain, numba):
        with pytest.raises(InputError, match=r"table must be int32 \[B, P\] and lengths \[B\]"):
            backend.read_codes(pages, table.long(), torch.tensor([1, 2]))
        with pytest.raises(InputError, match="do not fit a cache of pages"):
            backend.read_tokens(torch.zeros(2, 2, 8), torch.zeros(4, 2), table, torch.zeros(2, 3, 1, dtype=torch.int64))
    assert read_codes(pages, table, torch.tensor([1, 2]))[0].shape == (2, HEADS, 96, 1)
    write_codes(encoded(0, 1), torch.zeros(0, dtype=torch.int64), pages)
