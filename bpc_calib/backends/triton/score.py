"""Step 2: one integer per key and KV head to rank by, from codes and gains alone, and a first histogram of them.

A row of the matrix product holds `PACK` keys side by side, and its other factor repeats the queries on its block
diagonal: so the result has a column for each of these keys and each head, and none is padding. The product takes a
bit of every byte at a time, as a byte of 0 or 1: `c = 2 p . b - sum(p)`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.constants import COARSE, FORCED, GAIN_OFFSET, NEVER
from bpc_calib.backends.triton.language import ASM
from bpc_calib.backends.triton.plan import (
    PLAN_FIRST_TO,
    PLAN_LENGTH,
    PLAN_LIMIT,
    PLAN_LOW,
    PLAN_NEWEST_FROM,
    PLAN_SHIFT,
    planned,
)

__all__ = ["ScoreShape", "best_kernel", "score_kernel"]


class ScoreShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G: int
    G_UP: int
    H: int
    GROUP: str
    TIGHT: bool  # the codes of each row are contiguous
    PACK: int
    BLOCK: int


@triton.jit
def bit_of_bytes(x, s: tl.constexpr):
    """Bit `s` of every byte, as int8 of 0 or 1."""
    if ASM:
        # Four bytes at once; the mask drops the bits that the shift brings over from the next byte.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, %s; and.b32 $0, t, 0x01010101; }" % s,  # noqa: UP031  Triton's own
            "=r,r",
            [x],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        return (x >> s) & 1


@triton.jit
def head_scores(
    values,
    totals,
    codes: Strided,
    gain: Strided,
    row,
    first,
    length,
    shape: tl.constexpr,
):
    """int32 `[BLOCK / PACK, PACK, G_UP]` of the keys from `first` on."""
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    H: tl.constexpr = shape.H
    PACK: tl.constexpr = shape.PACK
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    own_codes = codes.at + b * codes.b + h * codes.h
    BYTES: tl.constexpr = H // 8
    ROWS: tl.constexpr = shape.BLOCK // PACK
    r = tl.arange(0, ROWS)
    byte = tl.arange(0, PACK * BYTES)
    key = first + r[:, None] * PACK + byte[None, :] // BYTES
    if shape.TIGHT:  # the usual case, and one that the compiler sees to be contiguous
        x = tl.load(
            own_codes + first.to(tl.int64) * BYTES + r[:, None] * (PACK * BYTES) + byte[None, :],
            mask=key < length,
            other=0,
        )
    else:
        x = tl.load(own_codes + key.to(tl.int64) * codes.n + byte[None, :] % BYTES, mask=key < length, other=0)
    column = tl.arange(0, PACK * G_UP)
    head = column % G_UP
    mine = (byte[:, None] // BYTES == column[None, :] // G_UP) & (head[None, :] < G)
    product = tl.zeros([ROWS, PACK * G_UP], tl.int32)
    for s in tl.static_range(8):
        p = tl.load(
            values + (row * G + head[None, :]) * H + (byte[:, None] % BYTES) * 8 + s,
            mask=mine,
            other=0,
        )
        product = tl.dot(bit_of_bytes(x, s), p, product, out_dtype=tl.int32)
    g = tl.arange(0, G_UP)
    total = tl.load(totals + row * G + g, mask=g < G, other=0)
    scores = 2 * tl.reshape(product, [ROWS, PACK, G_UP]) - total[None, None, :]
    if gain.at is not None:
        at = first + r[:, None] * PACK + tl.arange(0, PACK)[None, :]
        own_gain = gain.at + b * gain.b + h * gain.h
        gains = tl.load(own_gain + at.to(tl.int64) * gain.n, mask=at < length, other=0).to(tl.int32)
        scores = scores * (gains + GAIN_OFFSET)[:, :, None]
    return scores


@triton.jit
def counted(valid, valid_b, b, at, length):
    """Which tokens are real."""
    inside = at < length
    if valid is not None:
        inside = inside & (tl.load(valid + b * valid_b + at, mask=inside, other=0) != 0)
    return inside


@triton.jit
def best_kernel(
    values,
    totals,
    codes: Strided,
    gain: Strided,
    valid,
    valid_b,
    plan,
    best,
    shape: tl.constexpr,
):
    """The largest score of each head: grid (blocks of keys, rows)."""
    G_UP: tl.constexpr = shape.G_UP
    PACK: tl.constexpr = shape.PACK
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    length = planned(plan, row, PLAN_LENGTH)
    if first < length:
        scores = head_scores(values, totals, codes, gain, row, first, length, shape)
        at = first + tl.arange(0, BLOCK // PACK)[:, None] * PACK + tl.arange(0, PACK)[None, :]
        scores = tl.where(counted(valid, valid_b, b, at, length)[:, :, None], scores, NEVER)
        g = tl.arange(0, G_UP)
        tl.atomic_max(best + row * G_UP + g, tl.max(tl.max(scores, 0), 0), sem="relaxed")


@triton.jit
def score_kernel(
    values,
    totals,
    codes: Strided,
    gain: Strided,
    valid,
    valid_b,
    plan,
    best,
    ranked,
    ranked_r,
    coarse,
    shape: tl.constexpr,
):
    """`ranked [rows, N]`, and its histogram `coarse [rows, COARSE]`: grid as above.

    The histogram leaves out forced tokens and padding.
    """
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    GROUP: tl.constexpr = shape.GROUP
    PACK: tl.constexpr = shape.PACK
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    length = planned(plan, row, PLAN_LENGTH)
    if first < length:
        scores = head_scores(values, totals, codes, gain, row, first, length, shape)
        g = tl.arange(0, G_UP)[None, None, :]
        if GROUP == "relative":
            # With 16 heads and fewer, the clamp of `group_scores` changes nothing.
            below = scores - tl.load(best + row * G_UP + g)
            if valid is not None:
                below = tl.minimum(below, 0)  # padding is not among the best and may be above them
            limit = planned(plan, row, PLAN_LIMIT)
            nearest = below if G == G_UP else tl.where(g < G, below, NEVER)
            within = tl.maximum(below, -limit)
            within = within if G == G_UP else tl.where(g < G, within, 0)
            score = 4 * G * tl.max(nearest, 2) + tl.sum(within, 2)
        elif GROUP == "sum":
            score = tl.sum(scores, 2)  # the scores of padding heads are 0
        else:
            score = tl.max(scores if G == G_UP else tl.where(g < G, scores, NEVER), 2)
        at = first + tl.arange(0, BLOCK // PACK)[:, None] * PACK + tl.arange(0, PACK)[None, :]
        real = counted(valid, valid_b, b, at, length)
        forced = real & ((at >= planned(plan, row, PLAN_NEWEST_FROM)) | (at < planned(plan, row, PLAN_FIRST_TO)))
        stored = tl.where(real, tl.where(forced, FORCED, score), NEVER)
        tl.store(ranked + row.to(tl.int64) * ranked_r + at, stored, mask=at < length)
        digit = (score - planned(plan, row, PLAN_LOW)) >> planned(plan, row, PLAN_SHIFT)
        counts = tl.histogram(tl.reshape(digit, [BLOCK]), COARSE, mask=tl.reshape(real & ~forced, [BLOCK]))
        tl.atomic_add(coarse + row * COARSE + tl.arange(0, COARSE), counts, mask=counts > 0, sem="relaxed")
