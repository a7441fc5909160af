"""Step 1, for every key and query head: an integer from the key's code alone, by a look-up per nibble.

So vector databases rank (Andre, Kermarrec, Le Scouarnec, "Quicker ADC", 2019). A table has 16 entries and a warp 32
threads: each thread holds an entry of every table, and a look-up takes it from the thread that the nibble names.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided, head_of, token_at
from bpc_calib.backends.triton.language import ASM, GAIN_OFFSET, LEAST, STRIPES
from bpc_calib.backends.triton.limits import Limits, counted, length_of
from bpc_calib.backends.triton.plan import SIDE_BY_SIDE, span_of_program, whole
from bpc_calib.backends.triton.query import ENTRIES

__all__ = ["ScoreShape", "Scored", "score_kernel"]


class Scored(NamedTuple):
    """Where the kernel writes: see `Ranking` of `pipeline`."""

    heads: Any  # words of `PACK` heads
    best: Any


class ScoreShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G_UP: int
    PACK: int  # heads in a word: 1, 2 or 4
    H: int
    GROUP: str
    GAIN: bool
    PAGE: int  # tokens of a page, which are contiguous and a multiple of SIDE_BY_SIDE; 0: codes and gains lie in rows
    BLOCK: int


@triton.jit
def places(x: Strided, b, first, length, shape: tl.constexpr):
    """Where the tokens from `first` on lie, `[BLOCK]`."""
    if shape.PAGE:
        some = tl.arange(0, SIDE_BY_SIDE)
        n = first + tl.arange(0, shape.BLOCK // SIDE_BY_SIDE) * SIDE_BY_SIDE
        at = token_at(x, b, n, n < length, shape.PAGE)[:, None] + (some * x.n)[None, :]
        return tl.reshape(at, [shape.BLOCK])
    else:
        return token_at(x, b, first + tl.arange(0, shape.BLOCK), True, 0)


@triton.jit
def entries_of(tables, TABLES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """An entry of each table, `[BLOCK]` each: that of the thread's number, which `entry` takes from there."""
    some = tl.arange(0, BLOCK)
    lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [some], dtype=tl.int32, is_pure=True, pack=1)
    held = ()
    for j in tl.static_range(TABLES):
        held += (tl.load(tables + (j * ENTRIES + lane % ENTRIES) * WORDS),)
    return held


@triton.jit
def from_lane(x, lane):
    """The `x` of the thread of this number, but for multiples of the 32 of a warp."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, lane], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def entry(tables, held, j: tl.constexpr, nibble, WORDS: tl.constexpr):
    """Entry `nibble` of table `j`, in two pairs of heads; bits of the nibble above its four do not count."""
    if ASM:
        own = held[j]
        low = from_lane(own.to(tl.int32), nibble)
        high = low
        if own.dtype == tl.int64:
            high = from_lane((own >> 32).to(tl.int32), nibble)
    else:
        own = tl.load(tables + (j * ENTRIES + (nibble & (ENTRIES - 1))) * WORDS)
        low = own.to(tl.int32)
        high = low
        if own.dtype == tl.int64:
            high = (own >> 32).to(tl.int32)
    return low, high


@triton.jit
def codes_of(codes: Strided, b, h, first, last, shape: tl.constexpr):
    """Both words of the codes from `first` on, `[BLOCK]` each, 0 from `last` on; one word, twice, if it is all."""
    at = head_of(codes, b, h) + places(codes, b, first, last, shape)
    mask = first + tl.arange(0, shape.BLOCK) < last
    low = tl.load(at, mask=mask, other=0)
    return low, tl.load(at + 1, mask=mask, other=0) if shape.H > 64 else low


@triton.jit
def looked_up(tables, held, words, NIBBLES: tl.constexpr, WORDS: tl.constexpr):
    """The sums of the entries that the nibbles of each code name, in two pairs of heads."""
    low = tl.zeros(words[0].shape, tl.int32)
    high = low
    for j in tl.static_range(NIBBLES):
        nibbles = (words[j // 16] >> (j // 8 % 2 * 32)).to(tl.int32)
        low_part, high_part = entry(tables, held, j, nibbles >> (j % 8 * 4), WORDS)
        low += low_part
        high += high_part
    return low, high


@triton.jit
def raised(top, score, gains, counts, shape: tl.constexpr):
    """The larger of what is known of a head and its scores with the gain."""
    if shape.GAIN:
        score = score * gains
    return tl.maximum(top, tl.where(counts, score, LEAST))


@triton.jit
def raise_best(best, top, BLOCK: tl.constexpr, G_UP: tl.constexpr):
    """Raises the stripes of a head; a block begins with stripe 0."""
    stripe = tl.arange(0, STRIPES)
    tl.atomic_max(best + stripe * G_UP, tl.max(tl.reshape(top, [BLOCK // STRIPES, STRIPES]), 0), sem="relaxed")


@triton.jit(do_not_specialize=["length"])
def score_kernel(tables, codes: Strided, gain: Strided, made: Scored, limits: Limits, length, shape: tl.constexpr):
    """Scores `heads [rows, room, G_UP]`, and for "relative" raises `best [rows, STRIPES, G_UP]` to the largest ones.

    Key `i` is in stripe `i % STRIPES`. Grid (programs, rows, words of heads).
    """
    G_UP: tl.constexpr = shape.G_UP
    PACK: tl.constexpr = shape.PACK
    WORDS: tl.constexpr = G_UP // PACK
    NIBBLES: tl.constexpr = shape.H // 4
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    word = tl.program_id(2)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    tables += row.to(tl.int64) * (shape.H // 4 * ENTRIES * WORDS) + word
    heads = made.heads + row.to(tl.int64) * whole(length) * WORDS + word
    best = made.best + row.to(tl.int64) * (STRIPES * G_UP) + word * PACK
    length = length_of(limits, b, length)
    first, last = span_of_program(length, BLOCK)
    held = ()
    if ASM:
        held = entries_of(tables, NIBBLES, WORDS, BLOCK)
    next_words = codes_of(codes, b, h, first, last, shape)
    top_0 = tl.full([BLOCK], LEAST, tl.int32)
    top_1 = top_0
    top_2 = top_0
    top_3 = top_0
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < last
        words = next_words
        next_words = codes_of(codes, b, h, start + BLOCK, last, shape)  # always a block ahead
        low, high = looked_up(tables, held, words, NIBBLES, WORDS)
        SIGNS: tl.constexpr = 0x8000 if PACK == 1 else -0x7FFF8000  # the offset of each head
        low ^= SIGNS
        high ^= SIGNS
        packed = low.to(heads.dtype.element_ty)
        if PACK == 4:
            packed = high.to(tl.int64) << 32 | low.to(tl.int64) & 0xFFFFFFFF
        tl.store(heads + at * WORDS, packed, mask=at < whole(last))
        if shape.GROUP == "relative":
            gains = tl.zeros([BLOCK], tl.int32)
            if shape.GAIN:
                of_gain = head_of(gain, b, h) + places(gain, b, start, last, shape)
                gains = tl.load(of_gain, mask=mask, other=0).to(tl.int32) + GAIN_OFFSET
            counts = counted(limits, b, at, length)
            top_0 = raised(top_0, low << 16 >> 16, gains, counts, shape)
            if PACK > 1:
                top_1 = raised(top_1, low >> 16, gains, counts, shape)
            if PACK > 2:
                top_2 = raised(top_2, high << 16 >> 16, gains, counts, shape)
                top_3 = raised(top_3, high >> 16, gains, counts, shape)
    if shape.GROUP == "relative":
        raise_best(best, top_0, BLOCK, G_UP)
        if PACK > 1:
            raise_best(best + 1, top_1, BLOCK, G_UP)
        if PACK > 2:
            raise_best(best + 2, top_2, BLOCK, G_UP)
            raise_best(best + 3, top_3, BLOCK, G_UP)
