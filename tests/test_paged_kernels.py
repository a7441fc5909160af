"""Triton's kernels over pages against the same kernels over rows, bit for bit: interpreted, emulated or on a GPU."""

import pytest
import torch
from drawn import DEVICE, EXACT, draw

from bpc_calib.backends import plain
from bpc_calib.backends.triton import backend, pipeline
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.paging import CodePages, Fresh, Packing, Paged, Rows, read_codes, read_tokens, write_codes

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

KV_HEADS = 2
NOWHERE = 1 << 30  # a page that must not be read


def random_pages(count, size, words, behind=0):
    """Codes and gains, with other bytes behind those of each page."""
    room = KV_HEADS * size * (8 * words + 1) + behind
    raw = torch.randint(256, (count * room,), generator=torch.Generator().manual_seed(5), dtype=torch.uint8).to(DEVICE)
    codes = raw.view(torch.int64).as_strided((count, KV_HEADS, size, words), (room // 8, size * words, words, 1))
    return CodePages(codes, raw.as_strided((count, KV_HEADS, size), (room, size, 1), KV_HEADS * size * words * 8))


def random_table(lengths, size, seed=0):
    """Pages in any order, none twice; behind the pages of a sequence `NOWHERE`."""
    per_sequence = -(-max(lengths) // size)
    order = torch.randperm(len(lengths) * per_sequence, generator=torch.Generator().manual_seed(seed))
    table = order.int().view(len(lengths), per_sequence)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // size) :] = NOWHERE
    return table.to(DEVICE)


def rows_of(lengths, k, size):
    table = random_table(lengths, size)
    return Rows(table, torch.tensor(lengths, device=DEVICE), torch.tensor(k, device=DEVICE), max(k))


STEPS = {  # lengths, k, heads on a KV head, head_dim, bits, tokens of a page, dtype, rules
    "usual": ((300, 33, 288), (20, 33, 7), 4, 128, 64, 16, torch.bfloat16, {}),
    "float32": ((70, 96), (9, 11), 1, 64, 64, 32, torch.float32, {"recent": 4, "sink": 2}),
    "long": ((2600, 1), (60, 1), 2, 64, 64, 16, torch.float16, {}),
    "128 bits": ((90,), (11,), 16, 64, 128, 48, torch.bfloat16, {"group": "sum"}),
    "32 bits": ((257, 40), (5, 6), 5, 80, 32, 16, torch.bfloat16, {"group": "max", "recent": 1}),
}


@pytest.mark.emulated(gain=[True], step=["usual", "32 bits"])
@pytest.mark.seldom(gain=[False], step=["float32", "long", "32 bits"])  # as the other steps
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_over_pages_is_a_step_over_rows(step, gain):
    """The same tokens as the kernels choose from copied codes, and the same bits as they attend to copied rows."""
    lengths, k, heads, dim, bits, size, dtype, rules = STEPS[step]
    rows = rows_of(lengths, k, size)
    projection = draw(KV_HEADS, bits, dim, seed=1, dtype=dtype)
    pages = random_pages(rows.table.numel(), size, -(-bits // 64), behind=64)
    if bits == 32:
        pages.codes.bitwise_and_((1 << 32) - 1)
    # Heads behind places, as FlashAttention has them.
    cache = draw(rows.table.numel(), size, KV_HEADS, 2 * dim, seed=4, dtype=dtype).transpose(1, 2)
    paged, choice = Paged(pages, cache), Choice(0.1, **rules)
    query = draw(len(k), KV_HEADS, heads, dim, seed=3, dtype=dtype)
    out, chosen = backend.attend_pages(query, projection, paged, rows, choice, gain=gain)
    codes, gains = read_codes(pages, rows.table, rows.lengths)
    cached = Cached(codes, gains if gain else None, lengths=rows.lengths)
    assert torch.equal(
        chosen, backend.choose(query, projection, cached, rows.k.unsqueeze(-1), choice, width=rows.width)
    )
    assert (chosen >= 0).sum(-1).tolist() == [[each] * KV_HEADS for each in k]
    keys, values = read_tokens(paged, rows.table, chosen)
    listed = torch.arange(rows.width, device=DEVICE).expand_as(chosen).where(chosen >= 0, -1)
    assert torch.equal(out, backend.sparse_attention(query, keys, values, listed, choice.scaling))


@pytest.mark.emulated(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_of_8_bits(dtype):
    """Every byte of float8_e4m3fn but its two NaN is a key and a value once."""
    size, dim, heads, scales = 16, 64, 4, (torch.tensor([0.25]), torch.tensor([3.0]))
    rows = rows_of((40, 64), (40, 60), size)
    numbers = torch.arange(rows.table.numel() * KV_HEADS * size * 2 * dim, device=DEVICE).to(torch.uint8)
    numbers[(numbers & 127) == 127] = 0
    cache = numbers.view(-1, KV_HEADS, size, 2 * dim)[..., torch.randperm(2 * dim, device=DEVICE)]
    scales = tuple(each.to(DEVICE) for each in scales)
    paged = Paged(random_pages(len(cache), size, 1), cache.contiguous().view(torch.float8_e4m3fn), scales=scales)
    query = draw(2, KV_HEADS, heads, dim, seed=3, dtype=dtype)
    projection = draw(KV_HEADS, 64, dim, seed=1).to(dtype)
    found, chosen = backend.attend_pages(query, projection, paged, rows, Choice(0.001))
    keys, values = (each.to(torch.float32) for each in read_tokens(paged, rows.table, chosen))
    listed = torch.arange(rows.width, device=DEVICE).expand_as(chosen).where(chosen >= 0, -1)
    expected = plain.sparse_attention(query.float(), keys, values, listed, 0.001)
    assert expected.abs().mean() > 10
    error = EXACT[dtype] * values.abs().amax()
    torch.testing.assert_close(found.float(), expected, rtol=EXACT[dtype], atol=float(error))


@pytest.mark.emulated(tokens=[70], bits=[64])
@pytest.mark.seldom(tokens=[70], bits=[128])  # other words of a code with fewer tokens, a second block with 64 bits
@pytest.mark.seldom(tokens=[1], bits=[128])
@pytest.mark.parametrize("bits", [64, 128])
@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
def test_keys_are_hashed_into_their_slots(tokens, bits):
    """The codes of `encode_with`, where they belong; nothing else is written."""
    size, dim, dtype = 16, 64, torch.bfloat16
    encoder = make_encoder(
        draw(KV_HEADS, bits, dim, seed=1) / 16, dtype,
        metric=torch.eye(dim, device=DEVICE).expand(KV_HEADS, dim, dim) * 1.5, mean=draw(KV_HEADS, dim, seed=7),
    )  # fmt: skip
    keys = draw(1, max(1, tokens), KV_HEADS, dim, seed=2, dtype=dtype)[:, :tokens].transpose(1, 2)
    slots = torch.randperm(9 * size, generator=torch.Generator().manual_seed(1))[:tokens].to(DEVICE)
    if tokens > 1:
        slots[[1, tokens - 1]] = -1
    wanted, found = (random_pages(9, size, bits // 64, behind=64) for _ in range(2))
    write_codes(backend.encode_with(encoder, keys), slots, wanted)
    backend.hash_into(Fresh(encoder, keys, slots), found)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.gain, wanted.gain)


def test_sequences_in_groups(monkeypatch):
    """As many at once as scores have room for: five one by one, two and all give the same."""
    lengths, k, size, dim = (90, 33, 70, 16, 48), (9, 3, 11, 16, 1), 16, 64
    rows = rows_of(lengths, k, size)
    paged = Paged(random_pages(rows.table.numel(), size, 1), draw(rows.table.numel(), KV_HEADS, size, 2 * dim, seed=4))
    query, projection = draw(5, KV_HEADS, 4, dim, seed=3), draw(KV_HEADS, 64, dim, seed=1)
    each = pipeline.sequence_bytes((KV_HEADS, 4, 96), Choice(0.1), 64)
    found = []
    for room in (5 * each, each, 2 * each + 1):
        monkeypatch.setattr(pipeline, "WORKSPACE", room)
        found_room = pipeline.workspace((KV_HEADS, 4, 90), Choice(0.1), 64, 9)
        assert found_room == room // each * each
        found.append(backend.attend_pages(query, projection, paged, rows, Choice(0.1)))
    for out, chosen in found[1:]:
        assert torch.equal(chosen, found[0][1])
        torch.testing.assert_close(out, found[0][0], rtol=1e-5, atol=1e-5)


def test_other_pages_are_left_to_plain_torch():
    """Pages of 20 tokens, and packed ones: the same as the same tokens in pages of 16."""
    dim, length = 16, 60
    keys, values = draw(1, KV_HEADS, length, dim, seed=5), draw(1, KV_HEADS, length, dim, seed=6)
    encoder = make_encoder(draw(KV_HEADS, 64, dim, seed=1), torch.float32)
    query, found = draw(1, KV_HEADS, 3, dim, seed=3), []
    for size, is_packed in ((20, False), (20, True), (16, False)):
        rows = rows_of((length,), (7,), size)
        slots = (rows.table.long().view(-1, 1) * size + torch.arange(size, device=DEVICE)).flatten()[:length]
        cache = torch.zeros(rows.table.numel(), KV_HEADS, size, 2 * dim, device=DEVICE)
        cache[slots // size, :, slots % size] = torch.cat([keys, values], -1)[0].transpose(0, 1)
        paged = Paged(random_pages(len(cache), size, 1), cache)
        if is_packed:
            at = torch.arange(2 * size * dim, device=DEVICE).view(size, 2 * dim)
            packing = Packing(at[:, :dim].contiguous(), at[:, dim:].contiguous())
            paged = Paged(paged.codes, cache.flatten(2), packing)
        fresh = Fresh(encoder, keys, slots)
        found.append(backend.attend_pages(query, draw(KV_HEADS, 64, dim), paged, rows, Choice(0.25), fresh=fresh))
    for out, chosen in found[1:]:
        assert torch.equal(chosen, found[0][1])
        torch.testing.assert_close(out, found[0][0], rtol=1e-5, atol=1e-5)
