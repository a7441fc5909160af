"""Step 1: queries in int8, the plan of each row, and an integer per key and query head, from codes alone.

A row of the matrix product holds `PACK` keys side by side, and its other factor repeats the queries on its block
diagonal: so the result has a column for each of these keys and each head, and none is padding. The product takes a
bit of every byte at a time, as a byte of 0 or 1: `c = 2 p . b - sum(p)`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided, head_of, token_at
from bpc_calib.backends.triton.language import ASM, GAIN_OFFSET, LARGEST_QUERY, LEAST, STRIPES, divide, dot, round_even
from bpc_calib.backends.triton.limits import Limits, counted, length_of, number_of
from bpc_calib.backends.triton.plan import clear, make_plan, span_of_program, whole

__all__ = ["ScoreShape", "Scored", "bit_operand", "quantized", "score_kernel"]


class Scored(NamedTuple):
    """Where the kernel writes: see `Ranking` of `pipeline`."""

    rounded: Any  # `values` there; in kernels every tuple has an attribute of that name
    scale: Any
    plan: Any
    heads: Any
    best: Any
    counts: Any


class ScoreShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G: int
    G_UP: int
    H: int
    D: int
    PART: int  # dimensions of the queries at a time
    GROUP: str
    GAIN: bool
    TIGHT: bool  # the codes of each row are contiguous
    PAGE: int  # tokens of a page, which are contiguous and a multiple of PACK; 0: codes and gains lie in rows
    PACK: int
    BLOCK: int
    COUNTS: int  # bins of all histograms of a row, to clear


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
def codes_of(codes: Strided, b, h, first, length, shape: tl.constexpr):
    """int8 `[BLOCK / PACK, PACK H / 8]`: the codes of the keys from `first` on."""
    BYTES: tl.constexpr = shape.H // 8
    PACK: tl.constexpr = shape.PACK
    own = head_of(codes, b, h)
    r = tl.arange(0, shape.BLOCK // PACK)
    byte = tl.arange(0, PACK * BYTES)
    key = first + r[:, None] * PACK + byte[None, :] // BYTES
    if shape.PAGE:
        n = first + r * PACK
        within = byte if shape.TIGHT else byte // BYTES * codes.n + byte % BYTES
        at = own + token_at(codes, b, n, n < length, shape.PAGE)[:, None] + within[None, :]
    elif shape.TIGHT:  # the usual case, and one that the compiler sees to be contiguous
        at = own + tl.cast(first, tl.int64) * BYTES + r[:, None] * (PACK * BYTES) + byte[None, :]
    else:
        at = own + key.to(tl.int64) * codes.n + byte[None, :] % BYTES
    return tl.load(at, mask=key < length, other=0)


@triton.jit
def gains_of(gain: Strided, b, h, first, length, shape: tl.constexpr):
    """uint8 `[BLOCK / PACK, PACK]`: the gains of the keys from `first` on; 0 where none are needed."""
    PACK: tl.constexpr = shape.PACK
    r = first + tl.arange(0, shape.BLOCK // PACK) * PACK
    at = r[:, None] + tl.arange(0, PACK)[None, :]
    if not (shape.GAIN and shape.GROUP == "relative"):
        return tl.zeros([shape.BLOCK // PACK, PACK], tl.uint8)
    elif shape.PAGE:
        place = token_at(gain, b, r, r < length, shape.PAGE)[:, None] + tl.arange(0, PACK)[None, :]
        return tl.load(head_of(gain, b, h) + place, mask=at < length, other=0)
    else:
        return tl.load(head_of(gain, b, h) + at.to(tl.int64) * gain.n, mask=at < length, other=0)


@triton.jit(do_not_specialize=["length", "k"])
def score_kernel(
    query: Strided,
    projection: Strided,
    codes: Strided,
    gain: Strided,
    made: Scored,
    limits: Limits,
    length,
    k,
    scaling,
    shape: tl.constexpr,
):
    """Scores `heads [rows, room, G_UP]`, and for "relative" raises `best [rows, STRIPES, G_UP]` to the largest ones.

    Key `i` is in stripe `i % STRIPES`. Also writes the quantized queries and the plan, and clears `counts`. Grid
    (programs, rows). Every program quantizes the queries of its row anew, which saves a launch.
    """
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    H: tl.constexpr = shape.H
    PACK: tl.constexpr = shape.PACK
    BLOCK: tl.constexpr = shape.BLOCK
    ROWS: tl.constexpr = BLOCK // PACK
    FOLD: tl.constexpr = 64  # rows of maxima; rows 64 apart meet in one thread, where registers are few
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    room = whole(length)  # of a row of `heads`
    length = length_of(limits, b, length)
    k = number_of(limits, b, h, k)
    first, last = span_of_program(length, BLOCK)
    values, scale = quantized(query, projection, b, h, shape)
    g = tl.arange(0, G_UP)
    if tl.program_id(0) == 0:
        bit = tl.arange(0, H)
        at = (row * G + g[:, None]) * H + bit[None, :]
        tl.store(made.rounded + at, values.to(tl.int8), mask=g[:, None] < G)
        tl.store(made.scale + row, scale)
        most = tl.max(tl.sum(tl.abs(values), 1), 0)
        make_plan(made.plan, limits, row, length, k, most, scale, scaling, shape)
    clear(made.counts, row, shape.COUNTS)

    totals = tl.sum(values, 1)
    top = tl.full([FOLD, PACK, G_UP], LEAST, tl.int32)
    for start in range(first, last, BLOCK):
        x = codes_of(codes, b, h, start, last, shape)
        gains = gains_of(gain, b, h, start, last, shape)
        product = tl.zeros([ROWS, PACK * G_UP], tl.int32)
        for s in tl.static_range(8):
            product = tl.dot(bit_of_bytes(x, s), bit_operand(values, s, shape), product, out_dtype=tl.int32)
        scores = 2 * tl.reshape(product, [ROWS, PACK, G_UP]) - totals[None, None, :]
        at = start + tl.arange(0, ROWS)[:, None] * PACK + tl.arange(0, PACK)[None, :]
        to = made.heads + (row.to(tl.int64) * room + at)[:, :, None] * G_UP + g[None, None, :]
        tl.store(to, scores.to(tl.int16), mask=(at < whole(length))[:, :, None])
        if shape.GROUP == "relative":
            if shape.GAIN:
                scores = scores * (gains.to(tl.int32) + GAIN_OFFSET)[:, :, None]
            scores = tl.where(counted(limits, b, at, length)[:, :, None], scores, LEAST)
            top = tl.maximum(top, tl.max(tl.reshape(scores, [ROWS // FOLD, FOLD, PACK, G_UP]), 0))
    if shape.GROUP == "relative":
        best = tl.max(tl.reshape(top, [FOLD * PACK // STRIPES, STRIPES, G_UP]), 0)  # a block begins with stripe 0
        stripe = row.to(tl.int64) * STRIPES + tl.arange(0, STRIPES)
        tl.atomic_max(made.best + stripe[:, None] * G_UP + g[None, :], best, sem="relaxed")


HEADS = tl.constexpr(16)  # the least height of a matrix product, and the most heads there are


@triton.jit
def rounded(exact, largest, MOST: tl.constexpr):
    """`exact * MOST / largest` as int32 between `-MOST` and `MOST`."""
    one = tl.full([], 1, exact.dtype)
    # As torch rounds MOST / largest; where that overflows, values go to the ends of their range.
    inverse = tl.where(largest > 0, divide(one, tl.where(largest > 0, largest, 1)) * MOST, 0)
    scaled = tl.where(exact == 0, 0, exact * inverse)  # 0 stays 0, also times an inverse that overflows
    return round_even(tl.minimum(tl.maximum(scaled, -MOST), MOST)).to(tl.int32)


@triton.jit
def quantized(query: Strided, projection: Strided, b, h, shape: tl.constexpr):
    """`bpc_calib.method.scoring.quantize_query` of one row: int32 `[G_UP, H]`, and float32 scale.

    The projection has the dtype of the query. Rows from `G` on are 0.
    """
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    H: tl.constexpr = shape.H
    D: tl.constexpr = shape.D
    PART: tl.constexpr = shape.PART
    head = tl.arange(0, HEADS)
    bit = tl.arange(0, H)
    own_query = query.at + b * query.b + h * query.h
    own_projection = projection.at + b * projection.b + h * projection.h
    wide = tl.float64 if query.at.dtype.element_ty == tl.float64 else tl.float32
    exact = tl.zeros([HEADS, H], wide)
    for first in tl.static_range(0, D, PART):
        d = first + tl.arange(0, PART)
        q = tl.load(
            own_query + head[:, None] * query.n + d[None, :], mask=(head[:, None] < G) & (d[None, :] < D), other=0
        )
        P = tl.load(own_projection + bit[None, :] * projection.n + d[:, None], mask=d[:, None] < D, other=0)
        exact += dot(q, P)
    largest = tl.max(tl.max(tl.abs(exact), 1), 0)
    values = rounded(exact, largest, LARGEST_QUERY)
    if G_UP != HEADS:
        values = tl.sum(tl.reshape(values, [HEADS // G_UP, G_UP, H]), 0)  # all but the first G rows are 0
    return values, divide(largest, tl.full([], LARGEST_QUERY, wide)).to(tl.float32)


@triton.jit
def bit_operand(values, s: tl.constexpr, shape: tl.constexpr):
    """Bits `s`, `8 + s`, `16 + s` ... of `values [G_UP, H]`, on a block diagonal: int8 `[PACK H / 8, PACK G_UP]`."""
    G_UP: tl.constexpr = shape.G_UP
    PACK: tl.constexpr = shape.PACK
    BYTES: tl.constexpr = shape.H // 8
    of_byte = tl.reshape(values, [G_UP, BYTES, 8])
    mine = tl.sum(tl.where((tl.arange(0, 8) == s)[None, None, :], of_byte, 0), 2)
    key = tl.arange(0, PACK)
    same = key[:, None, None, None] == key[None, None, :, None]
    spread = tl.where(same, tl.trans(mine)[None, :, None, :], 0)
    return tl.reshape(spread.to(tl.int8), [PACK * BYTES, PACK * G_UP])
