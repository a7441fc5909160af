"""Queries of a KV head as int8, and as operands of the scoring product."""

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.constants import LARGEST_QUERY
from bpc_calib.backends.triton.language import divide, dot, round_even

__all__ = ["bit_operand", "quantized"]

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
