"""Step 1: the queries of a row as tables of integers, the plan of the row, and what later steps raise or count.

A code is read in nibbles, and a nibble stands for four bits: so a score is a sum of one table entry per nibble.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.language import LARGEST_QUERY, LARGEST_SCORE, LEAST, STRIPES, divide, dot, round_even
from bpc_calib.backends.triton.limits import Limits, length_of, number_of
from bpc_calib.backends.triton.plan import make_plan

__all__ = ["ENTRIES", "Prepared", "QueryShape", "query_kernel"]

ENTRIES = tl.constexpr(16)  # of a table: the values of a nibble
CLEARED = tl.constexpr(1024)  # bins at once


class Prepared(NamedTuple):
    """Where the kernel writes: see `Ranking` of `pipeline`."""

    scale: Any
    tables: Any
    plan: Any
    best: Any
    counts: Any


class QueryShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G: int
    G_UP: int
    H: int
    R: int  # rows of the projection: H of signs, 4 H of nibbles
    D: int
    PART: int  # dimensions of the queries at a time
    GROUP: str
    GAIN: bool
    COUNTS: int  # bins of all histograms of a row, to clear


@triton.jit(do_not_specialize=["length", "k"])
def query_kernel(
    query: Strided, projection: Strided, made: Prepared, limits: Limits, length, k, scaling, shape: tl.constexpr
):
    """Writes all of `made`; `best` is lower than any score, and `counts` 0. Grid (rows)."""
    G_UP: tl.constexpr = shape.G_UP
    row = tl.program_id(0)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    length = length_of(limits, b, length)
    k = number_of(limits, b, h, k)
    own_counts = made.counts + row.to(tl.int64) * shape.COUNTS
    for start in range(0, shape.COUNTS, CLEARED):
        at = start + tl.arange(0, CLEARED)
        tl.store(own_counts + at, tl.zeros([CLEARED], tl.int32), mask=at < shape.COUNTS)
    if shape.GROUP == "relative":
        at = tl.arange(0, STRIPES * G_UP)
        tl.store(made.best + row.to(tl.int64) * (STRIPES * G_UP) + at, tl.full([STRIPES * G_UP], LEAST, tl.int32))
    values, scale = quantized(query, projection, b, h, shape)
    tl.store(made.scale + row, scale)
    entries = entries_of(values, shape)
    write_tables(made.tables + row.to(tl.int64) * (shape.H // 4 * ENTRIES * G_UP), entries, shape)
    most = tl.max(tl.sum(tl.max(tl.abs(entries), 2), 1), 0)
    make_plan(made.plan, limits, row, length, k, most, scale, scaling, shape)


@triton.jit
def entries_of(values, shape: tl.constexpr):
    """What each value of each nibble adds to a score, int32 `[G_UP, H / 4, ENTRIES]`, of rounded products."""
    NIBBLES: tl.constexpr = shape.H // 4
    if shape.R > shape.H:
        return tl.reshape(values, [shape.G_UP, NIBBLES, ENTRIES])
    else:
        bit = tl.arange(0, 4)
        sign = 2 * (tl.arange(0, ENTRIES)[:, None] >> bit[None, :] & 1) - 1
        return tl.sum(tl.reshape(values, [shape.G_UP, NIBBLES, 4])[:, :, None, :] * sign[None, None, :, :], 3)


@triton.jit
def write_tables(tables, entries, shape: tl.constexpr):
    """The entries and 2^15 over their number in a code, as int16 `[H / 4, ENTRIES, G_UP]`.

    All are above 0, so that heads side by side in a word add up without a carry: the entries of a code sum to its score
    plus 2^15, which the bit of the sign takes away.
    """
    G_UP: tl.constexpr = shape.G_UP
    NIBBLES: tl.constexpr = shape.H // 4
    j = tl.arange(0, NIBBLES)
    entry = tl.arange(0, ENTRIES)
    g = tl.arange(0, G_UP)
    at = (j[None, :, None] * ENTRIES + entry[None, None, :]) * G_UP + g[:, None, None]
    tl.store(tables + at, (entries + (1 << 15) // NIBBLES).to(tl.int16))


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
    """The products of `bpc_calib.method.scoring.quantize_query` of one row: int32 `[G_UP, R]`, and float32 scale.

    The projection has the dtype of the query. Rows from `G` on are 0.
    """
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    R: tl.constexpr = shape.R
    D: tl.constexpr = shape.D
    MOST: tl.constexpr = LARGEST_SCORE // (shape.H // 4) if shape.R > shape.H else LARGEST_QUERY
    PART: tl.constexpr = shape.PART
    head = tl.arange(0, HEADS)
    r = tl.arange(0, R)
    own_query = query.at + b * query.b + h * query.h
    own_projection = projection.at + b * projection.b + h * projection.h
    wide = tl.float64 if query.at.dtype.element_ty == tl.float64 else tl.float32
    exact = tl.zeros([HEADS, R], wide)
    for first in tl.static_range(0, D, PART):
        d = first + tl.arange(0, PART)
        q = tl.load(
            own_query + head[:, None] * query.n + d[None, :], mask=(head[:, None] < G) & (d[None, :] < D), other=0
        )
        P = tl.load(own_projection + r[None, :] * projection.n + d[:, None], mask=d[:, None] < D, other=0)
        exact += dot(q, P)
    largest = tl.max(tl.max(tl.abs(exact), 1), 0)
    values = rounded(exact, largest, MOST)
    if G_UP != HEADS:
        values = tl.sum(tl.reshape(values, [HEADS // G_UP, G_UP, R]), 0)  # all but the first G rows are 0
    return values, divide(largest, tl.full([], MOST, wide)).to(tl.float32)
