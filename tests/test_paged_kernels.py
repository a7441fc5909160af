"""Triton's kernels over pages against the same kernels over rows, bit for bit: interpreted, emulated or on a GPU."""

from dataclasses import replace

import pytest
import torch
from drawn import DEVICE, EXACT, draw

from bpc_calib import find
from bpc_calib.backends.triton import backend, pipeline
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State, read_codes, read_tokens, within, write_codes
from bpc_calib.method.step import attend

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

KV_HEADS = 2
NOWHERE = 1 << 30  # a page that must not be read


def random_pages(cache, words, behind=0, **more):
    """Of keys and values `[pages, H_KV, size, 2 D]`: with codes and gains, and other bytes behind those of a page."""
    (count, _, size, dims), room = cache.shape, KV_HEADS * cache.shape[2] * (8 * words + 1) + behind
    raw = torch.randint(256, (count * room,), generator=torch.Generator().manual_seed(5), dtype=torch.uint8).to(DEVICE)
    codes = raw.view(torch.int64).as_strided((count, KV_HEADS, size, words), (room // 8, size * words, words, 1))
    gain = raw.as_strided((count, KV_HEADS, size), (room, size, 1), KV_HEADS * size * words * 8)
    return State(cache[..., : dims // 2], cache[..., dims // 2 :], codes, gain, **more)


def random_table(lengths, size, seed=0):
    """Pages in any order, none twice; behind the pages of a sequence `NOWHERE`."""
    per_sequence = -(-max(lengths) // size)
    order = torch.randperm(len(lengths) * per_sequence, generator=torch.Generator().manual_seed(seed))
    table = order.int().view(len(lengths), per_sequence)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // size) :] = NOWHERE
    return table.to(DEVICE)


def rows_of(lengths, k, size):
    lengths, k = torch.tensor(lengths, device=DEVICE), torch.tensor(k, device=DEVICE)
    table = random_table(lengths.tolist(), size)
    return Rows(lengths, k.unsqueeze(-1), int(lengths.max()), int(k.max()), block_table=table)


STEPS = {  # lengths, k, heads on a KV head, head_dim, bits, tokens of a page, dtype, rules
    "usual": ((300, 33, 288), (20, 33, 7), 4, 128, 64, 16, torch.bfloat16, {}),
    "float32": ((70, 96), (9, 11), 1, 64, 64, 32, torch.float32, {"recent": 4, "sink": 2}),
    "long": ((2600, 1), (60, 1), 2, 64, 64, 16, torch.float16, {}),
    "128 bits": ((90,), (11,), 16, 64, 128, 48, torch.bfloat16, {}),
    "nibbles": ((90, 33), (20, 7), 4, 128, 64, 16, torch.bfloat16, {}),
    "32 bits": ((257, 40), (5, 6), 5, 80, 32, 16, torch.bfloat16, {"group": "max", "recent": 1}),
}


@pytest.mark.emulated(gain=[True], step=["usual", "nibbles", "32 bits"])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_over_pages_is_a_step_over_rows(step, gain):
    """The same tokens and bits as of the same kernels over copies."""
    lengths, k, heads, dim, bits, size, dtype, rules = STEPS[step]
    rows = rows_of(lengths, k, size)
    nibbles = step == "nibbles"
    codebook = make_codebook(draw(KV_HEADS, bits * (4 if nibbles else 1), dim, seed=1), dtype, nibbles=nibbles)
    # Heads behind places, as FlashAttention has them.
    cache = draw(rows.block_table.numel(), size, KV_HEADS, 2 * dim, seed=4, dtype=dtype).transpose(1, 2)
    pages, rules = random_pages(cache, -(-bits // 64), behind=64), Rules(scaling=0.1, gain=gain, **rules)
    if bits == 32:
        pages.codes.bitwise_and_((1 << 32) - 1)
    query = draw(len(k), KV_HEADS, heads, dim, seed=3, dtype=dtype)
    out, chosen = backend.sparse_decode(query, codebook, pages, rows, rules)
    assert (chosen >= 0).sum(-1).tolist() == [[each] * KV_HEADS for each in k]
    every = torch.arange(rows.longest, device=DEVICE).where(within(rows), -1).unsqueeze(1).expand(-1, KV_HEADS, -1)
    copies = State(*read_tokens(pages, rows, every), *read_codes(pages, rows))
    expected = backend.sparse_decode(query, codebook, copies, replace(rows, block_table=None), rules)
    assert torch.equal(chosen, expected[1])
    assert torch.equal(out, expected[0])


@pytest.mark.emulated
def test_a_step_hashes_the_newest_keys_first():
    """As `append` does before a step."""
    size, dim, dtype = 16, 64, torch.bfloat16
    rows = rows_of((70, 33), (20, 7), size)
    codebook = make_codebook(draw(KV_HEADS, 64, dim, seed=1) / 16, dtype)
    cache = draw(rows.block_table.numel(), KV_HEADS, size, 2 * dim, seed=4, dtype=dtype)
    once, twice = (random_pages(cache, 1, behind=64) for _ in range(2))
    query, key = draw(2, KV_HEADS, 4, dim, seed=3, dtype=dtype), draw(2, KV_HEADS, dim, seed=2, dtype=dtype)
    slots = [int(rows.block_table[0, 4]) * size + 5, int(rows.block_table[1, 2]) * size]
    backend.append(twice, codebook, key.transpose(0, 1).unsqueeze(0), None, torch.tensor(slots, device=DEVICE))
    wanted = backend.sparse_decode(query, codebook, twice, rows, Rules())
    out = query * torch.nan, wanted[1] - 5
    assert backend.sparse_decode(query, codebook, once, rows, Rules(), key=key, out=out) is out
    assert all(map(torch.equal, out, wanted))
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.gain, twice.gain)


@pytest.mark.emulated(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_of_8_bits(dtype):
    """Every byte of float8_e4m3fn but its two NaN is a key and a value once."""
    size, dim, heads, scales = 16, 64, 4, (torch.tensor([0.25]), torch.tensor([3.0]))
    rows = rows_of((40, 64), (40, 60), size)
    numbers = torch.arange(rows.block_table.numel() * KV_HEADS * size * 2 * dim, device=DEVICE).to(torch.uint8)
    numbers[(numbers & 127) == 127] = 0
    cache = numbers.view(-1, KV_HEADS, size, 2 * dim)[..., torch.randperm(2 * dim, device=DEVICE)]
    scales = tuple(each.to(DEVICE) for each in scales)
    pages = random_pages(cache.contiguous().view(torch.float8_e4m3fn), 1, scales=scales)
    query = draw(2, KV_HEADS, heads, dim, seed=3, dtype=dtype)
    codebook = make_codebook(draw(KV_HEADS, 64, dim, seed=1), dtype)
    found, chosen = backend.sparse_decode(query, codebook, pages, rows, Rules(scaling=0.001))
    expected = attend(query.float(), pages, rows, chosen, 0.001)
    assert expected.abs().mean() > 10
    error = EXACT[dtype] * read_tokens(pages, rows, chosen)[1].abs().amax()
    torch.testing.assert_close(found.float(), expected, rtol=EXACT[dtype], atol=float(error))


@pytest.mark.emulated(tokens=[70], bits=[64])
@pytest.mark.emulated(tokens=[5], bits=[64], nibbles=[True])
@pytest.mark.parametrize("bits", [64, 128])
@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
@pytest.mark.parametrize("nibbles", [False, True])
def test_keys_are_hashed_into_their_slots(tokens, bits, nibbles):
    """The codes of `encode_with`, where they belong; nothing else is written."""
    size, dim, dtype = 16, 64, torch.bfloat16
    codebook = make_codebook(
        draw(KV_HEADS, bits * (4 if nibbles else 1), dim, seed=1) / 16, dtype, nibbles=nibbles,
        metric=torch.eye(dim, device=DEVICE).expand(KV_HEADS, dim, dim) * 1.5, mean=draw(KV_HEADS, dim, seed=7),
    )  # fmt: skip
    keys = draw(1, max(1, tokens), KV_HEADS, dim, seed=2, dtype=dtype)[:, :tokens].transpose(1, 2)
    slots = torch.randperm(9 * size, generator=torch.Generator().manual_seed(1))[:tokens].to(DEVICE)
    if tokens > 1:
        slots[[1, tokens - 1]] = -1
    cache = torch.zeros(9, KV_HEADS, size, 2 * dim, dtype=dtype, device=DEVICE)
    wanted, found = (random_pages(cache, bits // 64, behind=64) for _ in range(2))
    write_codes(backend.encode_with(codebook, keys), slots, wanted)
    backend.append(found, codebook, keys, None, slots)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.gain, wanted.gain)


@pytest.mark.emulated
def test_sequences_in_groups(monkeypatch):
    """As many at once as scores have room for: five one by one, two and all give the same."""
    lengths, k, size, dim = (90, 33, 70, 16, 48), (9, 3, 11, 16, 1), 16, 64
    rows, rules = rows_of(lengths, k, size), Rules(scaling=0.1)
    pages = random_pages(draw(rows.block_table.numel(), KV_HEADS, size, 2 * dim, seed=4), 1)
    query, codebook = draw(5, KV_HEADS, 4, dim, seed=3), make_codebook(draw(KV_HEADS, 64, dim, seed=1), torch.float32)
    each = pipeline.sequence_bytes((KV_HEADS, 4, 96), rules)
    found = []
    for room in (5 * each, each, 2 * each + 1):
        monkeypatch.setattr(pipeline, "WORKSPACE", room)
        found_room = pipeline.workspace((KV_HEADS, 4, 90), rules, 9)
        assert found_room == room // each * each
        found.append(backend.sparse_decode(query, codebook, pages, rows, rules))
    for out, chosen in found[1:]:
        assert torch.equal(chosen, found[0][1])
        torch.testing.assert_close(out, found[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.emulated
def test_other_pages_are_left_to_plain_torch(monkeypatch):
    """Pages of 20 tokens, and packed values: the same as the same tokens in pages of 16."""
    monkeypatch.setenv("BPC_BACKEND", "triton")
    dim, length = 16, 60
    keys, values = draw(1, KV_HEADS, length, dim, seed=5), draw(1, KV_HEADS, length, dim, seed=6)
    codebook = make_codebook(draw(KV_HEADS, 64, dim, seed=1), torch.float32)
    query, found = draw(1, KV_HEADS, 3, dim, seed=3), []
    for size, is_packed in ((20, False), (20, True), (16, True), (16, False)):
        rows = rows_of((length,), (7,), size)
        slots = (rows.block_table.long().view(-1, 1) * size + torch.arange(size, device=DEVICE)).flatten()[:length]
        cache = torch.zeros(rows.block_table.numel(), KV_HEADS, size, 2 * dim, device=DEVICE)
        cache[slots // size, :, slots % size] = torch.cat([keys, values], -1)[0].transpose(0, 1)
        pages = random_pages(cache, 1)
        if is_packed:
            at = torch.arange(2 * size * dim, device=DEVICE).view(size, 2 * dim)[:, dim:].contiguous()
            pages = replace(pages, values=cache.flatten(2), values_at=at)
        serving = find(query, pages)
        assert (serving is backend) != is_packed
        serving.append(pages, codebook, keys, None, slots)
        found.append(serving.sparse_decode(query, codebook, pages, rows, Rules()))
    for out, chosen in found[1:]:
        assert torch.equal(chosen, found[0][1])
        torch.testing.assert_close(out, found[0][0], rtol=1e-5, atol=1e-5)
