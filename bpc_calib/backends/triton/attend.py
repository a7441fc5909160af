"""Steps 6 and 7: exact attention over the listed tokens, split over the list, and the splits combined."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided, head_of, token_at
from bpc_calib.backends.triton.language import dot

__all__ = ["AttendShape", "Scales", "attend_kernel", "reduce_kernel"]


class Scales(NamedTuple):
    """What keys and values of 8 bits are multiplied by, pointers to float32; None: they have no scale."""

    of_keys: Any  # not `values`: in kernels every tuple has an attribute of that name
    of_values: Any


class AttendShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G: int
    D: int
    D_UP: int
    CHUNK: int
    BLOCK: int
    PAGE: int  # tokens of a page, keys and values lie alike in it; 0: they lie in rows


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Numbers as `dtype`; of float8_e4m3fn, whose bytes these are, the 256th part: exactly, on every GPU."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.int16)
        # Its exponent, of 4 bits, is 7 more than it says; that of float16, of 5 bits, 15 more.
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    else:
        return x


@triton.jit(do_not_specialize=["count"])
def attend_kernel(
    query: Strided,
    keys: Strided,
    values: Strided,
    indices,
    lengths,
    part,
    weight,
    largest,
    scale,
    count,
    scales: Scales,
    shape: tl.constexpr,
):
    """Attention over one chunk of `indices [rows, count]`; without indices, over the first `lengths [B]` tokens.

    Grid (splits, rows). Leaves sums of values `part [rows, splits, G, D]` weighted by `exp(logit - largest)`, the
    sum of these weights and the largest logit, `[rows, splits, G]` each.
    """
    G: tl.constexpr = shape.G
    D: tl.constexpr = shape.D
    D_UP: tl.constexpr = shape.D_UP
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK: tl.constexpr = shape.BLOCK
    split = tl.program_id(0)
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    g = tl.arange(0, 16)  # the least height of a matrix product
    d = tl.arange(0, D_UP)
    q = tl.load(
        query.at + b * query.b + h * query.h + g[:, None] * query.n + d[None, :],
        mask=(g[:, None] < G) & (d[None, :] < D),
        other=0,
    )
    own_keys = head_of(keys, b, h)
    own_values = head_of(values, b, h)
    if scales.of_keys is not None:
        scale = scale * (tl.load(scales.of_keys) * 256)
    wide = tl.float64 if query.at.dtype.element_ty == tl.float64 else tl.float32
    top = tl.full([16], float("-inf"), wide)
    total = tl.zeros([16], wide)
    sums = tl.zeros([16, D_UP], wide)
    end = count if indices is not None else tl.minimum(tl.load(lengths + b).to(tl.int32), count)
    for first in range(0, CHUNK, BLOCK):
        at = split * CHUNK + first + tl.arange(0, BLOCK)
        if indices is not None:
            token = tl.load(indices + row.to(tl.int64) * count + at, mask=at < end, other=-1).to(tl.int64)
        else:
            token = tl.where(at < end, at, -1).to(tl.int64)
        listed = token >= 0
        mask = listed[:, None] & (d[None, :] < D)
        of_key = token_at(keys, b, token, listed, shape.PAGE)
        of_value = token_at(values, b, token, listed, shape.PAGE) if shape.PAGE == 0 else of_key
        k = widened(tl.load(own_keys + of_key[:, None] + d[None, :], mask=mask, other=0), q.dtype)
        v = widened(tl.load(own_values + of_value[:, None] + d[None, :], mask=mask, other=0), q.dtype)
        logits = tl.where(listed[None, :], dot(q, tl.trans(k)) * scale, float("-inf"))
        next_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(next_top == float("-inf"), 0.0, next_top)  # no token so far
        weights = tl.exp(logits - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None] + dot(weights.to(v.dtype), v)
        top = next_top
    if scales.of_values is not None:
        sums = sums * (tl.load(scales.of_values) * 256)
    at = (row.to(tl.int64) * tl.num_programs(0) + split) * G + g
    tl.store(part + at[:, None] * D + d[None, :], sums, mask=(g[:, None] < G) & (d[None, :] < D))
    tl.store(weight + at, total, mask=g < G)
    tl.store(largest + at, top, mask=g < G)


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    part,
    weight,
    largest,
    out,
    splits,
    D: tl.constexpr,
    D_UP: tl.constexpr,
    SPLITS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combines the splits into `out [rows, G, D]`: grid (G, rows)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    d = tl.arange(0, D_UP)
    wide = part.dtype.element_ty
    top = tl.full([], float("-inf"), wide)
    total = tl.zeros([], wide)
    sums = tl.zeros([D_UP], wide)
    for first in tl.static_range(0, SPLITS_UP, BLOCK):
        split = first + tl.arange(0, BLOCK)
        at = (row.to(tl.int64) * splits + split) * tl.num_programs(0) + head
        # All loads first: none waits for another.
        tops = tl.load(largest + at, mask=split < splits, other=float("-inf"))
        weights = tl.load(weight + at, mask=split < splits, other=0)
        mask = (split[:, None] < splits) & (d[None, :] < D)
        parts = tl.load(part + at[:, None] * D + d[None, :], mask=mask, other=0)
        next_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(next_top == float("-inf"), 0.0, next_top)
        share = tl.exp(tops - base)
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(share * weights, 0)
        sums = sums * fade + tl.sum(share[:, None] * parts, 0)
        top = next_top
    out += (row.to(tl.int64) * tl.num_programs(0) + head) * D
    mean = tl.where(total > 0, sums / tl.where(total > 0, total, 1), 0)  # without any token: 0
    tl.store(out + d, mean.to(out.dtype.element_ty), mask=d < D)
