"""Step 4: exact attention over the tokens chosen, read where they lie."""

from typing import NamedTuple

import numba
import numpy as np

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.language import WIDE, add_four, at, dot_four, float_of, prefetch_row, widen

__all__ = ["Attention", "attend_kernel", "attend_listed", "attend_part", "listed_of", "put_together", "work_size"]

CHUNK = 16  # tokens whose weights are computed at once; nothing is prefetched meanwhile
AHEAD = 12  # how many tokens ahead keys are prefetched
F32, I64 = np.empty(0, np.float32), np.empty(0, np.int64)
LOG2E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.1219444e-4)
LEAST = np.float32(-87)  # e^-87 is nearly 0, and still a normal number
FAST = {"reassoc", "contract", "nsz"}  # sums in any order; infinities stay what they are


class Attention(NamedTuple):
    """What `attend_kernel` works on: sizes, and addresses with strides in elements, as in `Step`; `_n` are tokens."""

    query: int
    query_b: int
    query_h: int
    query_g: int
    keys: int
    keys_b: int
    keys_h: int
    keys_n: int
    values: int
    values_b: int
    values_h: int
    values_n: int
    indices: int  # int64 [rows, count]
    count: int
    scaling: float

    rows: int
    kv_heads: int
    heads: int
    dim: int
    tokens: int
    parts: int  # of each list

    partial: int  # float32 [rows, parts, H, dim], sums of values weighted by exponentials
    weights: int  # float32 [rows, parts, 2, heads], the largest logit and the sum of the exponentials
    work: int  # `work_size` bytes per part
    faults: int  # int64 [rows, parts], whether an index is beyond the tokens

    out: int  # float32 [rows, heads, dim]


@inlined(fastmath={"contract"})
def exponentials(x, most):
    """`e^(x - most)` of float32 in place, for x of at most that, to 2 units in the last place: whole vectors."""
    for i in range(len(x)):
        # 2^n e^r with r in [-ln 2 / 2, ln 2 / 2], ln 2 in two parts, and the Taylor series of the latter.
        given = max(x[i] - most, LEAST)
        whole = np.rint(given * LOG2E)
        r = (given - whole * LN2_HIGH) - whole * LN2_LOW
        series = np.float32(1 / 5040)
        series = series * r + np.float32(1 / 720)
        series = series * r + np.float32(1 / 120)
        series = series * r + np.float32(1 / 24)
        series = series * r + np.float32(1 / 6)
        series = series * r + np.float32(1 / 2)
        series = series * r + np.float32(1)
        series = series * r + np.float32(1)
        x[i] = series * float_of(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@inlined
def work_size(heads, dim, most):
    """Bytes of the intermediate results of a part: queries as float32, logits, and its list of `most` tokens."""
    fours = (heads + 3) // 4 * 4
    return (4 * fours * (dim + CHUNK) + 8 * most + 63) // 64 * 64


@inlined
def tokens_of(indices, begin, end, tokens, listed):
    """Copy the indices from `begin` to `end` that are tokens; how many, and whether one is beyond all tokens."""
    count, beyond = 0, False
    for i in range(begin, end):
        if indices[i] >= tokens:
            beyond = True
        elif indices[i] >= 0:
            listed[count] = indices[i]
            count += 1
    return count, beyond


@inlined
def logits_of(like, keys, keys_n, values, values_n, listed, begin, count, dim, queries, logits):
    """Logits `[4, CHUNK]` of the keys listed from `begin` on with the queries of 4 heads, `[4, dim]`.

    If `values` are given, prefetches the values of these tokens and the keys that come soon.
    """
    for i in range(begin, begin + count):
        if values:
            prefetch_row(values + values_n * listed[i], dim * like.itemsize)
            prefetch_row(keys + keys_n * listed[min(i + AHEAD, len(listed) - 1)], dim * like.itemsize)
        key, out = keys + keys_n * listed[i], logits + 4 * (i - begin)
        dot_four(like, key, queries, dim, out, CHUNK)
        for j in range(dim // WIDE * WIDE, dim):
            for g in range(4):
                product = at(queries, 4 * dim, F32)[g * dim + j] * widen(at(key, dim, like)[j])
                at(out, 4 * CHUNK, F32)[g * CHUNK] += product


@inlined
def largest_of(x):
    """The largest of float32, by their bits: unlike comparisons that heed NaN, these run on whole vectors."""
    best = np.int32(-(1 << 31))
    bits = x.view(np.int32)
    for i in range(len(bits)):
        best = max(best, np.int32(bits[i] ^ np.int32(np.int32(bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return float_of(np.int32(best ^ np.int32(np.int32(best >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@inlined(fastmath=FAST)
def weigh(logits, count, heads, dim, most, total, sums):
    """Turn the logits `[heads, CHUNK]` into weights, and scale the earlier sums to match."""
    for g in range(heads):
        weights = at(logits + 4 * CHUNK * g, count, F32)
        largest = largest_of(weights)
        if largest > most[g]:
            down = np.exp(most[g] - largest)
            most[g] = largest
            total[g] *= down
            summed = at(sums + 4 * dim * g, dim, F32)
            for d in range(dim):
                summed[d] *= down
        exponentials(weights, most[g])
        added = np.float32(0)
        for i in range(count):
            added += weights[i]
        total[g] += added
        at(logits + 4 * (CHUNK * g + count), CHUNK - count, F32)[:] = 0


@inlined
def add_values(like, values, values_n, listed, begin, count, dim, weights, sums):
    """The values listed, weighted by `weights [4, CHUNK]`, added to `sums [4, dim]`: 4 values at once."""
    last = begin + count - 1
    for i in range(begin, begin + count, 4):
        add_four(
            like, values + values_n * listed[i], values + values_n * listed[min(i + 1, last)],
            values + values_n * listed[min(i + 2, last)], values + values_n * listed[min(i + 3, last)],
            weights + 4 * (i - begin), CHUNK, sums, dim,
        )  # fmt: skip
        for j in range(dim // WIDE * WIDE, dim):
            for g in range(4):
                for token in range(i, min(i + 4, last + 1)):
                    weight = at(weights, 4 * CHUNK, F32)[g * CHUNK + token - begin]
                    value = at(values + values_n * listed[token], dim, like)
                    at(sums, 4 * dim, F32)[g * dim + j] += weight * widen(value[j])


@inlined
def attend_part(task, like, call):
    """Attention of one part of a row, to be put together."""
    size, count = like.itemsize, call.count
    each = (count + call.parts - 1) // call.parts
    row, part = task // call.parts, task % call.parts
    b, h = row // call.kv_heads, row % call.kv_heads
    room = listed_of(task, call)
    found, beyond = tokens_of(
        at(call.indices + 8 * row * count, count, I64), part * each, min(count, (part + 1) * each), call.tokens, room
    )
    at(call.faults + 8 * task, 1, I64)[0] = beyond
    keys = call.keys + size * (b * call.keys_b + h * call.keys_h)
    values = call.values + size * (b * call.values_b + h * call.values_h)
    attend_listed(task, like, call, keys, values, room[:found])


@inlined
def listed_of(task, call):
    """The memory for the list of tokens of a part."""
    fours, each = (call.heads + 3) // 4 * 4, (call.count + call.parts - 1) // call.parts
    begin = call.work + task * work_size(call.heads, call.dim, each)
    return at(begin + 4 * fours * (call.dim + CHUNK), each, I64)


@inlined
def attend_listed(task, like, call, keys, values, tokens):
    """Attention over the tokens listed; keys and values of the row are given as addresses."""
    size, heads, dim = like.itemsize, call.heads, call.dim
    each, found = (call.count + call.parts - 1) // call.parts, len(tokens)
    row = task // call.parts
    b, h = row // call.kv_heads, row % call.kv_heads
    fours = (heads + 3) // 4 * 4
    sums = call.partial + 4 * task * fours * dim
    queries = call.work + task * work_size(heads, dim, each)
    logits = queries + 4 * fours * dim
    wide = at(queries, fours * dim, F32)
    wide[heads * dim :] = 0
    at(sums, fours * dim, F32)[:] = 0
    for g in range(heads):
        query = at(call.query + size * (b * call.query_b + h * call.query_h + g * call.query_g), dim, like)
        for d in range(dim):
            wide[g * dim + d] = widen(query[d]) * np.float32(call.scaling)
    most = at(call.weights + 8 * task * heads, heads, F32)
    total = at(call.weights + 8 * task * heads + 4 * heads, heads, F32)
    most[:] = -np.inf
    total[:] = 0
    keys_n, values_n = size * call.keys_n, size * call.values_n
    for i in range(min(AHEAD, found)):
        prefetch_row(keys + keys_n * tokens[i], size * dim)
    for begin in range(0, found, CHUNK):
        chunk = min(CHUNK, found - begin)
        for g in range(0, fours, 4):
            logits_of(
                like, keys, keys_n, values if g == 0 else 0, values_n, tokens, begin, chunk, dim,
                queries + 4 * g * dim, logits + 4 * g * CHUNK,
            )  # fmt: skip
        weigh(logits, chunk, heads, dim, most, total, sums)
        for g in range(0, fours, 4):
            add_values(
                like, values, values_n, tokens, begin, chunk, dim, logits + 4 * g * CHUNK, sums + 4 * g * dim
            )  # fmt: skip


@inlined(fastmath=FAST)
def put_together(row, call):
    """float32 `[heads, dim]` of a row from its parts; 0 where nothing was attended."""
    heads, dim = call.heads, call.dim
    fours = (heads + 3) // 4 * 4
    for g in range(heads):
        out = at(call.out + 4 * (row * heads + g) * dim, dim, F32)
        out[:] = 0
        largest, total = np.float32(-np.inf), np.float32(0)
        for part in range(row * call.parts, (row + 1) * call.parts):
            largest = max(largest, at(call.weights + 8 * part * heads, heads, F32)[g])
        for part in range(row * call.parts, (row + 1) * call.parts):
            weights = at(call.weights + 8 * part * heads, 2 * heads, F32)
            if weights[heads + g] != 0:
                down = np.exp(weights[g] - largest)
                total += down * weights[heads + g]
                sums = at(call.partial + 4 * (part * fours + g) * dim, dim, F32)
                for d in range(dim):
                    out[d] += down * sums[d]
        if total != 0:
            for d in range(dim):
                out[d] /= total


@compiled(parallel=True)
def attend_kernel(like, fields):
    """Softmax attention over each list, for an `Attention` given as a plain tuple; whether all indices are tokens."""
    call = Attention(*fields)
    for index in numba.prange(call.rows * call.parts):
        attend_part(np.int64(index), like, call)
    for row in range(call.rows):
        put_together(row, call)
    return not at(call.faults, call.rows * call.parts, I64).any()
