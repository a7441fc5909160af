"""Codes, keys and values in pages, as inference servers keep them: copied from and to rows by one thread per row."""

from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.language import at
from bpc_calib.backends.cpu.layout import like
from bpc_calib.backends.cpu.threads import run
from bpc_calib.method.encoding import Encoded
from bpc_calib.method.paging import CodePages, check_indices, check_table

__all__ = ["read_codes", "read_tokens", "write_codes"]

I32, I64, U8 = (np.empty(0, kind) for kind in (np.int32, np.int64, np.uint8))


class _Codes(NamedTuple):
    """Sizes, addresses and strides (in elements) for `write_kernel` and `read_kernel`."""

    codes: int  # int64 [pages, H_KV, size, words]
    codes_page: int
    codes_h: int
    gain: int  # uint8 [pages, H_KV, size]
    gain_page: int
    gain_h: int
    kv_heads: int
    size: int
    words: int
    rows: int  # tokens to write, or sequences and KV heads to read
    tokens: int  # of each row that is read
    slots: int  # int64 [tokens] to write; int32 [B, pages per sequence] to read
    lengths: int  # int64 [B]
    pages: int  # per sequence
    own_codes: int  # int64 [H_KV, tokens, words] to write; [rows, tokens, words] to read
    own_gain: int  # uint8


@compiled
def write_kernel(fields):
    """`write_codes` for a `_Codes`, given as a plain tuple."""
    call = _Codes(*fields)
    words, size = call.words, call.size
    slots = at(call.slots, call.rows, I64)
    for token in range(call.rows):
        if slots[token] < 0:
            continue
        page, place = slots[token] // size, slots[token] % size
        for h in range(call.kv_heads):
            own = h * call.rows + token
            to = at(call.codes + 8 * (page * call.codes_page + h * call.codes_h + place * words), words, I64)
            to[:] = at(call.own_codes + 8 * words * own, words, I64)
            gain = at(call.gain + page * call.gain_page + h * call.gain_h + place, 1, U8)
            gain[0] = at(call.own_gain + own, 1, U8)[0]


@inlined
def read_row(row, call):
    """Copy the pages of one row, page by page."""
    b, h = row // call.kv_heads, row % call.kv_heads
    words, size = call.words, call.size
    table = at(call.slots + 4 * b * call.pages, call.pages, I32)
    used = (at(call.lengths + 8 * b, 1, I64)[0] + size - 1) // size
    for i in range(used):
        page, own = np.int64(table[i]), row * call.tokens + i * size
        codes = at(call.codes + 8 * (page * call.codes_page + h * call.codes_h), size * words, I64)
        at(call.own_codes + 8 * words * own, size * words, I64)[:] = codes
        at(call.own_gain + own, size, U8)[:] = at(call.gain + page * call.gain_page + h * call.gain_h, size, U8)


@compiled(parallel=True)
def read_kernel(fields):
    """`read_codes` for a `_Codes`, given as a plain tuple."""
    call = _Codes(*fields)
    for index in numba.prange(call.rows):
        read_row(np.int64(index), call)


class _Tokens(NamedTuple):
    """Sizes, addresses and strides (in elements) for `tokens_kernel`."""

    cache: int  # [pages, H_KV, content]
    cache_page: int
    cache_h: int
    where: int  # int64 [size, dim]
    size: int
    dim: int
    table: int  # int32 [B, pages]
    pages: int
    indices: int  # int64 [rows, count]
    rows: int
    kv_heads: int
    count: int
    out: int  # [rows, count, dim]


@inlined
def tokens_of_row(row, like, call):
    """Copy the chosen tokens of one row."""
    b, h, dim, size = row // call.kv_heads, row % call.kv_heads, call.dim, call.size
    indices = at(call.indices + 8 * row * call.count, call.count, I64)
    table = at(call.table + 4 * b * call.pages, call.pages, I32)
    for i in range(call.count):
        out = at(call.out + like.itemsize * (row * call.count + i) * dim, dim, like)
        token = indices[i]
        if token < 0:
            out[:] = 0
            continue
        page = np.int64(table[token // size])
        from_page = call.cache + like.itemsize * (page * call.cache_page + h * call.cache_h)
        where = at(call.where + 8 * (token % size) * dim, dim, I64)
        for d in range(dim):
            out[d] = at(from_page + like.itemsize * where[d], 1, like)[0]


@compiled(parallel=True)
def tokens_kernel(like, fields):
    """`read_tokens` for a `_Tokens`, given as a plain tuple."""
    call = _Tokens(*fields)
    for index in numba.prange(call.rows):
        tokens_of_row(np.int64(index), like, call)


def write_codes(encoded: Encoded, slots: Tensor, pages: CodePages) -> None:
    """`bpc_calib.method.paging.write_codes`."""
    slots, codes, gain = slots.contiguous(), encoded.codes.contiguous(), encoded.gain.contiguous()
    call = _codes(pages, len(slots), 0, slots, slots, codes, gain)
    run(write_kernel, tuple(call))


def read_codes(pages: CodePages, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """`bpc_calib.method.paging.read_codes`."""
    check_table(table, lengths)
    (_, kv_heads, size, words), (batch, per_sequence) = pages.codes.shape, table.shape
    table, lengths, tokens = table.contiguous(), lengths.to(torch.int64).contiguous(), per_sequence * size
    codes = torch.empty(batch, kv_heads, tokens, words, dtype=torch.int64)
    gain = torch.empty(batch, kv_heads, tokens, dtype=torch.uint8)
    run(read_kernel, tuple(_codes(pages, batch * kv_heads, tokens, table, lengths, codes, gain)))
    return codes, gain


def read_tokens(cache: Tensor, where: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """`bpc_calib.method.paging.read_tokens`."""
    check_indices(cache, table, indices)
    (batch, kv_heads, count), (size, dim) = indices.shape, where.shape
    where, table, indices = where.contiguous(), table.contiguous(), indices.contiguous()
    out = torch.empty(batch, kv_heads, count, dim, dtype=cache.dtype)
    call = _Tokens(
        cache=cache.data_ptr(), cache_page=cache.stride(0), cache_h=cache.stride(1),
        where=where.data_ptr(), size=size, dim=dim, table=table.data_ptr(), pages=table.shape[1],
        indices=indices.data_ptr(), rows=batch * kv_heads, kv_heads=kv_heads, count=count, out=out.data_ptr(),
    )  # fmt: skip
    run(tokens_kernel, like(cache), tuple(call))
    return out


def _codes(
    pages: CodePages, rows: int, tokens: int, slots: Tensor, lengths: Tensor, codes: Tensor, gain: Tensor
) -> _Codes:
    _, kv_heads, size, words = pages.codes.shape
    return _Codes(
        codes=pages.codes.data_ptr(), codes_page=pages.codes.stride(0), codes_h=pages.codes.stride(1),
        gain=pages.gain.data_ptr(), gain_page=pages.gain.stride(0), gain_h=pages.gain.stride(1),
        kv_heads=kv_heads, size=size, words=words, rows=rows, tokens=tokens, slots=slots.data_ptr(),
        lengths=lengths.data_ptr(), pages=slots.shape[-1], own_codes=codes.data_ptr(), own_gain=gain.data_ptr(),
    )  # fmt: skip
