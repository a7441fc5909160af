"""Launches of the kernels that attend: to listed tokens, or to all."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from bpc_calib.backends.triton.arguments import Strided, strided
from bpc_calib.backends.triton.attend import AttendShape, Scales, attend_kernel, reduce_kernel
from bpc_calib.backends.triton.language import ROUNDED_TWICE

__all__ = ["NO_SCALES", "Source", "attention", "dense_attention", "sparse_attention"]

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


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scale: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention`."""
    source = Source(strided(keys), strided(values))
    return attention(query, source, indices.shape[-1], scale, indices=indices.contiguous())


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float | None = None) -> Tensor:
    """`bpc_calib.method.dense_attention.dense_attention`, of sequences without padding."""
    source = Source(strided(keys), strided(values))
    return attention(query, source, keys.shape[2], scale, lengths=lengths.contiguous())


def attention(
    query: Tensor,
    source: Source,
    count: int,
    scale: float | None,
    *,
    indices: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Steps 6 and 7: over `indices [B, H_KV, count]`, or over the first `lengths [B]` of `count` tokens."""
    batch, kv_heads, heads, dim = query.shape
    rows = batch * kv_heads
    if query.dtype == torch.float64:  # kernels get numbers as float32
        query, scale = query * (dim**-0.5 if scale is None else scale), 1.0
    dim_up = max(16, triton.next_power_of_2(dim))  # the least depth of a matrix product
    # As many bytes for wider dtypes and larger heads: the least of today's GPUs have 99 KB for a block.
    block = max(16, 2 * LISTED * 128 // (query.element_size() * max(128, dim_up)))
    # A power of two, so that few kernels are compiled while a list grows.
    chunk = max(block, triton.next_power_of_2(triton.cdiv(count * rows, SPLITS)))
    splits = max(1, triton.cdiv(count, chunk))
    splits_up = triton.next_power_of_2(splits)
    wide = torch.promote_types(query.dtype, torch.float32)
    part = torch.empty(rows, splits, heads, dim, dtype=wide, device=query.device)
    weight = torch.empty(rows, splits, heads, dtype=wide, device=query.device)
    largest = torch.empty_like(weight)
    out = torch.empty(batch, kv_heads, heads, dim, dtype=query.dtype, device=query.device)
    attend_kernel[(splits, rows)](
        strided(query), source.keys, source.values, indices, lengths, part, weight, largest,
        dim**-0.5 if scale is None else scale, count, source.scales,
        AttendShape(H_KV=kv_heads, G=heads, D=dim, D_UP=dim_up, CHUNK=chunk, BLOCK=block, PAGE=source.page),
        num_warps=4 if query.element_size() * dim_up <= 512 else 8,
        num_stages=3 if query.element_size() == 2 and torch.version.hip is None else 1, **ROUNDED_TWICE,
    )  # fmt: skip
    reduce_kernel[(heads, rows)](
        part, weight, largest, out, splits,
        D=dim, D_UP=dim_up, SPLITS_UP=splits_up, BLOCK=min(splits_up, max(1, COMBINED // dim_up)), num_warps=4,
        **ROUNDED_TWICE,
    )  # fmt: skip
    return out
