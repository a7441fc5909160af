"""Steps 6 and 7: exact attention over the listed tokens, split over the list, and the splits combined."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bpc_calib.backends.triton.arguments import Strided, head_of, strided, token_at
from bpc_calib.backends.triton.language import ROUNDED_TWICE, dot, registers

__all__ = [
    "NO_SCALES",
    "AttendShape",
    "Parts",
    "Scales",
    "Source",
    "attend_kernel",
    "attention",
    "queries_at_once",
    "reduce_kernel",
]


class Scales(NamedTuple):
    """What keys and values of 8 bits are multiplied by, pointers to float32; None: they have no scale."""

    of_keys: Any  # not `values`: in kernels every tuple has an attribute of that name
    of_values: Any


class Parts(NamedTuple):
    """Attention over the splits of each row, pointers."""

    sums: Any  # [rows, splits, queries, D], values weighted by `exp(logit - largest)`
    weight: Any  # [rows, splits, queries], the sum of these weights
    largest: Any  # [rows, splits, queries], the largest logit


class AttendShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G: int
    G_UP: int  # rows of a product of matrices: all queries of a KV head
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


@triton.jit(do_not_specialize=["count", "new"])
def attend_kernel(
    query: Strided,
    keys: Strided,
    values: Strided,
    indices,
    lengths,
    parts: Parts,
    scaling,
    count,
    new,
    scales: Scales,
    shape: tl.constexpr,
):
    """Attention over one chunk of `indices [rows, count]`; without indices, over the first `lengths [B]` tokens.

    Grid (splits, rows). With `new`, as many queries of each head follow one another, of the newest tokens, and each
    reads no token after its own.
    """
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    D: tl.constexpr = shape.D
    D_UP: tl.constexpr = shape.D_UP
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK: tl.constexpr = shape.BLOCK
    split = tl.program_id(0)
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    g = tl.arange(0, G_UP)
    d = tl.arange(0, D_UP)
    heads = G if new is None else G * new
    q = tl.load(
        query.at + b * query.b + h * query.h + g[:, None] * query.n + d[None, :],
        mask=(g[:, None] < heads) & (d[None, :] < D),
        other=0,
    )
    own_keys = head_of(keys, b, h)
    own_values = head_of(values, b, h)
    if scales.of_keys is not None:
        scaling = scaling * (tl.load(scales.of_keys) * 256)
    wide = tl.float64 if query.at.dtype.element_ty == tl.float64 else tl.float32
    top = tl.full([G_UP], float("-inf"), wide)
    total = tl.zeros([G_UP], wide)
    sums = tl.zeros([G_UP, D_UP], wide)
    end = count if indices is not None else tl.minimum(tl.load(lengths + b).to(tl.int32), count)
    some = True
    if indices is not None:  # a list that ends before this chunk leaves nothing to do
        some = tl.load(indices + row.to(tl.int64) * count + split * CHUNK) >= 0
    if some:
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
            seen = listed[None, :] if new is None else at[None, :] <= (end - new + g % new)[:, None]
            logits = tl.where(seen, dot(q, tl.trans(k)) * scaling, float("-inf"))
            next_top = tl.maximum(top, tl.max(logits, 1))
            base = tl.where(next_top == float("-inf"), 0.0, next_top)  # no token so far
            weights = tl.exp(logits - base[:, None])
            fade = tl.exp(top - base)
            total = total * fade + tl.sum(weights, 1)
            sums = sums * fade[:, None] + dot(weights.to(v.dtype), v)
            top = next_top
    if scales.of_values is not None:
        sums = sums * (tl.load(scales.of_values) * 256)
    at = (row.to(tl.int64) * tl.num_programs(0) + split) * heads + g
    tl.store(parts.sums + at[:, None] * D + d[None, :], sums, mask=(g[:, None] < heads) & (d[None, :] < D))
    tl.store(parts.weight + at, total, mask=g < heads)
    tl.store(parts.largest + at, top, mask=g < heads)


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
    RAGGED: tl.constexpr,
):
    """Combines the splits into `out [rows, G, D]`: grid (G, rows). `RAGGED`: many splits of some rows are empty."""
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
        # All loads first: none waits for another, but where that reads the parts of empty splits.
        tops = tl.load(largest + at, mask=split < splits, other=float("-inf"))
        weights = tl.load(weight + at, mask=split < splits, other=0)
        mask = (weights[:, None] != 0 if RAGGED else split[:, None] < splits) & (d[None, :] < D)
        parts = tl.load(part + at[:, None] * D + d[None, :], mask=mask, other=0)
        next_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(next_top == float("-inf"), 0.0, next_top)
        part_fade = tl.exp(tops - base)
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(part_fade * weights, 0)
        sums = sums * fade + tl.sum(part_fade[:, None] * parts, 0)
        top = next_top
    out += (row.to(tl.int64) * tl.num_programs(0) + head) * D
    mean = tl.where(total == 0, 0, sums / tl.where(total == 0, 1, total))  # without any token: 0; NaN stays
    tl.store(out + d, mean.to(out.dtype.element_ty), mask=d < D)


# Sizes to tune on a GPU; none changes more of a result than its rounding.
SPLITS = 512  # parts of the lists of one attention, at most
LISTED = 64  # tokens attended at once, of 16-bit dtypes and head_dim 128
COMBINED = 8192  # entries of parts of attention read at once

NO_SCALES = Scales(None, None)


@dataclass(frozen=True)
class Source:
    """Keys and values as the kernels read them."""

    keys: Strided
    values: Strided
    page: int = 0  # tokens of a page; 0: keys and values lie in rows
    scales: Scales = NO_SCALES


def tokens_at_once(query: Tensor) -> int:
    """Tokens that a program attends to at once: as many bytes for wider dtypes and larger heads."""
    dim_up = triton.next_power_of_2(query.shape[-1])
    return int(max(16, 2 * LISTED * 128 // (query.element_size() * max(128, dim_up))))  # the least GPUs have 99 KB


def queries_at_once(query: Tensor) -> int:
    """The most queries of a KV head that a program attends with, as registers and shared memory hold them."""
    return tokens_at_once(query) * (2 if query.element_size() == 2 and query.shape[-1] <= 128 else 1)


def attention(
    query: Tensor,
    source: Source,
    count: int,
    scaling: float | None,
    *,
    indices: Tensor | None = None,
    lengths: Tensor | None = None,
    mean: int | None = None,
    new: int = 1,
) -> Tensor:
    """Steps 6 and 7: over `indices [B, H_KV, count]`, or over the first `lengths [B]` of `count` tokens.

    `mean` is about how many tokens a list has, and decides how it is split; None: `count`. The queries
    `[B, H_KV, G * new, D]` are at most `queries_at_once`.
    """
    batch, kv_heads, heads, dim = query.shape
    rows = batch * kv_heads
    if query.dtype == torch.float64:  # kernels get numbers as float32
        query, scaling = query * (dim**-0.5 if scaling is None else scaling), 1.0
    # The least height and depth of a matrix product.
    heads_up, dim_up = max(16, triton.next_power_of_2(heads)), max(16, triton.next_power_of_2(dim))
    block = tokens_at_once(query)
    # Keys and values of 8 bits take registers twice: as they are read, and as they are multiplied.
    wider = dim_up if source.keys.at.element_size() == 1 else 0
    # A power of two, so that few kernels are compiled while a list grows.
    chunk = max(block, triton.next_power_of_2(triton.cdiv(min(count, mean or count) * rows, SPLITS)))
    splits = max(1, triton.cdiv(count, chunk))
    splits_up = triton.next_power_of_2(splits)
    wide = torch.promote_types(query.dtype, torch.float32)
    part = torch.empty(rows, splits, heads, dim, dtype=wide, device=query.device)
    weight = torch.empty(rows, splits, heads, dtype=wide, device=query.device)
    largest = torch.empty_like(weight)
    out = torch.empty(batch, kv_heads, heads, dim, dtype=query.dtype, device=query.device)
    attend_kernel[(splits, rows)](
        strided(query), source.keys, source.values, indices, lengths, Parts(part, weight, largest),
        dim**-0.5 if scaling is None else scaling, count, None if new == 1 else new, source.scales,
        AttendShape(
            H_KV=kv_heads, G=heads // new, G_UP=heads_up, D=dim, D_UP=dim_up, CHUNK=chunk, BLOCK=block,
            PAGE=source.page,
        ),
        num_warps=4 if heads_up * (query.element_size() * dim_up + wider) <= 8192 else 8,
        num_stages=3 if query.element_size() == 2 and torch.version.hip is None else 1,
        **registers(128, limited=bool(wider)), **ROUNDED_TWICE,
    )  # fmt: skip
    reduce_kernel[(heads, rows)](
        part, weight, largest, out, splits,
        D=dim, D_UP=dim_up, SPLITS_UP=splits_up, BLOCK=min(splits_up, max(1, COMBINED // dim_up)),
        RAGGED=mean is not None and 2 * mean < count, num_warps=4,
        **ROUNDED_TWICE,
    )  # fmt: skip
    return out
