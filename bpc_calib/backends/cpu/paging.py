"""A step over pages, as inference servers keep them, as one kernel: a thread takes a row from its pages to its result.

Codes are copied to memory of the thread, where they stay cached until they are ranked; so are the keys and values of
the tokens chosen.
"""

from typing import NamedTuple

import numba
import numpy as np

from bpc_calib.backends.cpu.attend import Attention, attend_listed, listed_of, put_together, work_size
from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.encode import Hashing, hash_row
from bpc_calib.backends.cpu.kernels import SELECT, choose_rows
from bpc_calib.backends.cpu.language import at, prefetch, prefetch_row
from bpc_calib.backends.cpu.score import PAD, sample_size
from bpc_calib.backends.cpu.step import Step

__all__ = ["Call", "Written", "hash_into_kernel", "pages_kernel", "room_size", "write_kernel"]

SOON = 3  # how many tokens ahead packed numbers are prefetched
PACKED_KEYS, PACKED_VALUES = 2, 16  # numbers that lie side by side, in vLLM's packing for AMX
I32, I64, U8 = (np.empty(0, kind) for kind in (np.int32, np.int64, np.uint8))


class Written(NamedTuple):
    """Where codes lie in pages, and which of their slots are written: addresses, and strides in elements."""

    codes: int  # int64 [pages, H_KV, size, words]
    codes_page: int
    codes_h: int
    gain: int  # uint8 [pages, H_KV, size]
    gain_page: int
    gain_h: int
    kv_heads: int
    size: int
    words: int
    tokens: int
    slots: int  # int64 [tokens]
    own_codes: int  # int64 [H_KV, tokens, words]
    own_gain: int  # uint8 [H_KV, tokens]


@inlined
def write_row(h, call):
    """The codes of a KV head to their slots."""
    words, size = call.words, call.size
    slots = at(call.slots, call.tokens, I64)
    for token in range(call.tokens):
        if slots[token] < 0:
            continue
        page, place, own = slots[token] // size, slots[token] % size, h * call.tokens + token
        to = at(call.codes + 8 * (page * call.codes_page + h * call.codes_h + place * words), words, I64)
        to[:] = at(call.own_codes + 8 * words * own, words, I64)
        gain = at(call.gain + page * call.gain_page + h * call.gain_h + place, 1, U8)
        gain[0] = at(call.own_gain + own, 1, U8)[0]


@compiled
def write_kernel(fields):
    """The codes of all KV heads to their slots, for a `Written` given as a plain tuple."""
    call = Written(*fields)
    for h in range(call.kv_heads):
        write_row(np.int64(h), call)


@inlined
def hash_and_write(h, like, hashing, codes):
    """Hash the keys of a KV head, and write their codes."""
    hash_row(h, like, hashing)
    write_row(h, codes)


@compiled(parallel=True)
def hash_into_kernel(like, hashing, codes):
    """`hash_into` for at most `SIDE` tokens, for a `Hashing` and a `Written` given as plain tuples."""
    hashed, call = Hashing(*hashing), Written(*codes)
    for index in numba.prange(call.kv_heads):
        hash_and_write(np.int64(index), like, hashed, call)


class Call(NamedTuple):
    """What `pages_kernel` works on: sizes, rules, addresses, and strides in elements, as in `Step`."""

    element: int
    query: int
    query_b: int
    query_h: int
    query_g: int
    projection: int
    projection_h: int
    projection_n: int
    batch: int
    kv_heads: int
    heads: int
    dim: int
    bits: int
    words: int

    codes: int  # int64 [pages, H_KV, size, words]
    codes_page: int
    codes_h: int
    gain: int  # uint8 [pages, H_KV, size]
    gain_page: int
    gain_h: int
    cache: int  # [pages, H_KV, content]
    cache_page: int
    cache_h: int
    keys_at: int  # int64 [size, dim]
    values_at: int
    size: int

    table: int  # int32 [batch, pages]
    pages: int
    lengths: int  # int64 [batch]
    ks: int  # int64 [batch]
    width: int

    gained: bool
    group: int
    recent: int
    sink: int
    scaling: float

    slots: int
    table_size: int
    room: int  # `room_size` bytes
    indices: int  # int64 [rows, width]
    out: int  # float32 [rows, heads, dim]


class Own(NamedTuple):
    """The memory of each slot that codes, keys and values are copied to."""

    codes: int  # int64 [slots, stride, words]
    gain: int  # uint8 [slots, stride]
    keys: int  # [slots, width, dim]
    values: int


@inlined
def piece(begin, size):
    """Where a piece of memory ends that begins there: at a multiple of 64."""
    return begin + (size + 63) // 64 * 64


@inlined
def laid_out(like, call):
    """What the memory of a call is used for: an `Own`, a `Step`, an `Attention`; and where it ends."""
    rows, fours, slots, dim, width = call.batch * call.kv_heads, (call.heads + 3) // 4, call.slots, call.dim, call.width
    tokens = call.pages * call.size
    stride = (tokens + PAD - 1) // PAD * PAD + PAD
    own_codes = call.room
    own_gain = piece(own_codes, 8 * slots * stride * call.words)
    own_keys = piece(own_gain, slots * stride)
    own_values = piece(own_keys, slots * width * dim * like.itemsize)
    totals = piece(own_values, slots * width * dim * like.itemsize)
    tables = piece(totals, 16 * rows * fours)
    best = piece(tables, 4 * rows * fours * call.table_size)
    products = piece(best, 16 * rows * fours)
    sample = piece(products, 8 * slots * fours * stride)
    marks = piece(sample, slots * sample_size(fours))
    least = piece(marks, slots * stride // 8)
    candidates = piece(least, 4 * rows)
    counts = piece(candidates, 8 * slots * stride)
    values = piece(counts, 8 * rows)
    scale = piece(values, rows * call.heads * call.bits)
    partial = piece(scale, 4 * rows)
    weights = piece(partial, 16 * rows * fours * dim)
    work = piece(weights, 8 * rows * call.heads)
    end = piece(work, rows * work_size(call.heads, dim, width))
    gain = own_gain if call.gained else 0
    step = Step(
        stages=SELECT, element=call.element,
        rows=rows, kv_heads=call.kv_heads, heads=call.heads, dim=dim, bits=call.bits, words=call.words, tokens=tokens,
        slots=slots, parts=1, part_size=stride,
        query=call.query, query_b=call.query_b, query_h=call.query_h, query_g=call.query_g,
        projection=call.projection, projection_b=0, projection_h=call.projection_h, projection_n=call.projection_n,
        codes=own_codes, codes_b=0, codes_h=0, codes_slot=stride * call.words,
        gain=gain, gain_b=0, gain_h=0, gain_slot=stride, valid=0, valid_b=0,
        lengths=call.lengths, worst=0, worst_count=0, ks=call.ks, ks_b=1, ks_h=0, k=0,
        group=call.group, recent=call.recent, sink=call.sink, numerator=0, denominator=1, scaling=call.scaling,
        totals=totals, table_size=call.table_size, tables=tables, stride=stride, products=products, best=best,
        sample=sample, marks=marks, least=least, candidates=candidates, counts=counts,
        values=values, scale=scale, indices=call.indices, width=width,
    )  # fmt: skip
    attention = Attention(
        query=call.query, query_b=call.query_b, query_h=call.query_h, query_g=call.query_g,
        keys=own_keys, keys_b=0, keys_h=0, keys_n=dim, values=own_values, values_b=0, values_h=0, values_n=dim,
        indices=call.indices, count=width, scaling=call.scaling,
        rows=rows, kv_heads=call.kv_heads, heads=call.heads, dim=dim, tokens=width, parts=1,
        partial=partial, weights=weights, work=work, faults=0, out=call.out,
    )  # fmt: skip
    return Own(own_codes, own_gain, own_keys, own_values), step, attention, end


@compiled
def room_size(like, fields):
    """Bytes that `pages_kernel` needs for a `Call`, given as a plain tuple."""
    call = Call(*fields)
    return laid_out(like, call)[3] - call.room


@inlined
def copy_codes(row, slot, step, call, own):
    """Codes and gains of a row, page after page."""
    b, h = row // step.kv_heads, row % step.kv_heads
    words, size = step.words, call.size
    table = at(call.table + 4 * b * call.pages, call.pages, I32)
    length = at(step.lengths + 8 * b, 1, I64)[0]
    pages = (length + size - 1) // size
    for i in range(pages):
        page, soon = np.int64(table[i]), np.int64(table[min(i + 1, pages - 1)])
        prefetch_row(call.codes + 8 * (soon * call.codes_page + h * call.codes_h), 8 * size * words)
        prefetch_row(call.gain + soon * call.gain_page + h * call.gain_h, size)
        to, count = slot * step.stride + i * size, min(size, length - i * size)
        codes = at(call.codes + 8 * (page * call.codes_page + h * call.codes_h), count * words, I64)
        at(own.codes + 8 * words * to, count * words, I64)[:] = codes
        gains = at(call.gain + page * call.gain_page + h * call.gain_h, count, U8)
        at(own.gain + to, count, U8)[:] = gains


@inlined
def packed(token, b, h, like, call):
    """Where a page has the key and the value of a token, and in which order their numbers lie."""
    page = np.int64(at(call.table + 4 * b * call.pages, call.pages, I32)[token // call.size])
    begin = call.cache + like.itemsize * (page * call.cache_page + h * call.cache_h)
    first = token % call.size * call.dim
    return begin, at(call.keys_at + 8 * first, call.dim, I64), at(call.values_at + 8 * first, call.dim, I64)


@inlined
def unpack(row, slot, like, call, own):
    """Keys and values of the tokens chosen, one after the other; how many."""
    b, h, dim, width = row // call.kv_heads, row % call.kv_heads, call.dim, call.width
    chosen = at(call.indices + 8 * row * width, width, I64)
    for i in range(width):
        if chosen[i] < 0:
            return i
        soon = chosen[min(i + SOON, width - 1)]
        if soon >= 0:
            begin, keys_at, values_at = packed(soon, b, h, like, call)
            for d in range(0, dim, PACKED_KEYS):
                prefetch(begin + like.itemsize * keys_at[d])
            for d in range(0, dim, PACKED_VALUES):
                prefetch(begin + like.itemsize * values_at[d])
        begin, keys_at, values_at = packed(chosen[i], b, h, like, call)
        to = like.itemsize * (slot * width + i) * dim
        keys, values = at(own.keys + to, dim, like), at(own.values + to, dim, like)
        for d in range(dim):
            keys[d] = at(begin + like.itemsize * keys_at[d], 1, like)[0]
        for d in range(dim):
            values[d] = at(begin + like.itemsize * values_at[d], 1, like)[0]
    return width


@inlined
def rows_of_slot(slot, like, call):
    """Choice and attention of all rows of one slot."""
    own, step, attention, _ = laid_out(like, call)
    for row in range(slot * step.rows // step.slots, (slot + 1) * step.rows // step.slots):
        copy_codes(row, slot, step, call, own)
        choose_rows(row, row + 1, slot, step)
        listed = listed_of(row, attention)[: unpack(row, slot, like, call, own)]
        for i in range(len(listed)):
            listed[i] = i
        first = like.itemsize * slot * call.width * call.dim
        attend_listed(row, like, attention, own.keys + first, own.values + first, listed)
        put_together(row, attention)


@compiled(parallel=True)
def pages_kernel(like, hashing, codes, fields):
    """`attend_pages` for a `Hashing`, a `Written` and a `Call` given as plain tuples."""
    hashed, written, call = Hashing(*hashing), Written(*codes), Call(*fields)
    for index in numba.prange(written.kv_heads):
        hash_and_write(np.int64(index), like, hashed, written)
    for index in numba.prange(call.slots):
        rows_of_slot(np.int64(index), like, call)
