"""Step 4: exact attention over the tokens chosen, read where they lie."""

import numba
import numpy as np

from bpc_calib.backends.cpu.language import WIDE, add_four, ask, at, compiled, dot_four, float_of, inlined, widen

__all__ = ["attend_kernel"]

CHUNK = 16  # tokens whose weights are made at once: more, and nothing is asked for meanwhile
AHEAD = 12  # tokens whose keys are asked for before they are needed
F32, I64 = np.empty(0, np.float32), np.empty(0, np.int64)
LOG2E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.1219444e-4)
LEAST = np.float32(-87)  # e^-87 is next to nothing, and still a normal number
FAST = {"reassoc", "contract", "nsz"}  # sums in any order; infinities stay what they are


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
def work_size(heads, dim, share):
    """Bytes for what a part makes on the way: queries as float32, logits, and its list of `share` tokens."""
    fours = (heads + 3) // 4 * 4
    return (4 * fours * (dim + CHUNK) + 8 * share + 63) // 64 * 64


@inlined
def real(indices, begin, end, tokens, listed):
    """Copy the places between `begin` and `end` that are tokens; how many, and whether one is beyond all tokens."""
    count, beyond = 0, False
    for i in range(begin, end):
        if indices[i] >= tokens:
            beyond = True
        elif indices[i] >= 0:
            listed[count] = indices[i]
            count += 1
    return count, beyond


@inlined
def multiply(like, keys, keys_n, values, values_n, listed, begin, count, dim, asked, logits):
    """Logits `[4, CHUNK]` of the keys listed from `begin` on with the queries of 4 heads, `asked [4, dim]`.

    On the way the values of these tokens are asked for, if given, and the keys that come soon.
    """
    for i in range(begin, begin + count):
        if values:
            ask(values + values_n * listed[i], dim * like.itemsize)
            ask(keys + keys_n * listed[min(i + AHEAD, len(listed) - 1)], dim * like.itemsize)
        key, out = keys + keys_n * listed[i], logits + 4 * (i - begin)
        dot_four(like, key, asked, dim, out, CHUNK)
        for j in range(dim // WIDE * WIDE, dim):
            for g in range(4):
                product = at(asked, 4 * dim, F32)[g * dim + j] * widen(at(key, dim, like)[j])
                at(out, 4 * CHUNK, F32)[g * CHUNK] += product


@inlined
def largest_of(x):
    """The largest of float32, by their bits: whole vectors, as a comparison that minds NaN is not."""
    best = np.int32(-(1 << 31))
    bits = x.view(np.int32)
    for i in range(len(bits)):
        best = max(best, np.int32(bits[i] ^ np.int32(np.int32(bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return float_of(np.int32(best ^ np.int32(np.int32(best >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@inlined(fastmath=FAST)
def weigh(logits, count, heads, dim, most, total, sums):
    """Make the logits `[heads, CHUNK]` weights, and what was summed before comparable with them."""
    for g in range(heads):
        mine = at(logits + 4 * CHUNK * g, count, F32)
        largest = largest_of(mine)
        if largest > most[g]:
            down = np.exp(most[g] - largest)
            most[g] = largest
            total[g] *= down
            summed = at(sums + 4 * dim * g, dim, F32)
            for d in range(dim):
                summed[d] *= down
        exponentials(mine, most[g])
        some = np.float32(0)
        for i in range(count):
            some += mine[i]
        total[g] += some
        at(logits + 4 * (CHUNK * g + count), CHUNK - count, F32)[:] = 0


@inlined
def add(like, values, values_n, listed, begin, count, dim, weights, sums):
    """The values listed, weighed by `weights [4, CHUNK]`, added to `sums [4, dim]`: 4 values at once."""
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
def attend_part(
    task, like, query, query_b, query_h, query_g, keys, tokens, keys_b, keys_h, keys_n, values, values_b, values_h,
    values_n, indices, count, scale, kv_heads, heads, dim, parts, sums, weights, work, faults,
):  # fmt: skip
    """What one thread does of `attend_kernel`."""
    size = like.itemsize
    share = (count + parts - 1) // parts
    row, part = task // parts, task % parts
    b, h = row // kv_heads, row % kv_heads
    fours = (heads + 3) // 4 * 4
    sums += 4 * task * fours * dim
    asked = work + task * work_size(heads, dim, share)
    logits = asked + 4 * fours * dim
    room = at(logits + 4 * fours * CHUNK, share, I64)
    wide = at(asked, fours * dim, F32)
    wide[heads * dim :] = 0
    at(sums, fours * dim, F32)[:] = 0
    for g in range(heads):
        given = at(query + size * (b * query_b + h * query_h + g * query_g), dim, like)
        for d in range(dim):
            wide[g * dim + d] = widen(given[d]) * np.float32(scale)
    most, total = at(weights + 8 * task * heads, heads, F32), at(weights + 8 * task * heads + 4 * heads, heads, F32)
    most[:] = -np.inf
    total[:] = 0
    found, beyond = real(
        at(indices + 8 * row * count, count, I64), part * share, min(count, (part + 1) * share), tokens, room
    )
    at(faults + 8 * task, 1, I64)[0] = beyond
    listed = room[:found]
    keys += size * (b * keys_b + h * keys_h)
    values += size * (b * values_b + h * values_h)
    for i in range(min(AHEAD, found)):
        ask(keys + size * keys_n * listed[i], size * dim)
    for begin in range(0, found, CHUNK):
        some = min(CHUNK, found - begin)
        for g in range(0, fours, 4):
            multiply(
                like, keys, size * keys_n, values if g == 0 else 0, size * values_n, listed, begin, some, dim,
                asked + 4 * g * dim, logits + 4 * g * CHUNK,
            )  # fmt: skip
        weigh(logits, some, heads, dim, most, total, sums)
        for g in range(0, fours, 4):
            add(
                like, values, size * values_n, listed, begin, some, dim, logits + 4 * g * CHUNK, sums + 4 * g * dim
            )  # fmt: skip


@inlined(fastmath=FAST)
def put_together(row, heads, dim, parts, partial, weights, out):
    """float32 `[heads, dim]` of a row, of what its parts left; 0 where nothing was attended."""
    fours = (heads + 3) // 4 * 4
    for g in range(heads):
        mine = at(out + 4 * (row * heads + g) * dim, dim, F32)
        mine[:] = 0
        largest, total = np.float32(-np.inf), np.float32(0)
        for part in range(row * parts, (row + 1) * parts):
            largest = max(largest, at(weights + 8 * part * heads, heads, F32)[g])
        for part in range(row * parts, (row + 1) * parts):
            left = at(weights + 8 * part * heads, 2 * heads, F32)
            if left[heads + g] != 0:
                down = np.exp(left[g] - largest)
                total += down * left[heads + g]
                sums = at(partial + 4 * (part * fours + g) * dim, dim, F32)
                for d in range(dim):
                    mine[d] += down * sums[d]
        if total != 0:
            for d in range(dim):
                mine[d] /= total


@compiled(parallel=True)
def attend_kernel(
    like, query, query_b, query_h, query_g, keys, tokens, keys_b, keys_h, keys_n, values, values_b, values_h, values_n,
    indices, count, scale, rows, kv_heads, heads, dim, parts, partial, weights, work, faults, out,
):  # fmt: skip
    """Softmax attention over each list, in `parts` shares; whether all indices were those of tokens.

    On the way: `partial` float32 `[rows, parts, heads up to 4s, dim]`, sums of values weighed by exponentials;
    `weights` float32 `[rows, parts, 2, heads]`, the largest logit and the sum of the exponentials; `work`, `[rows,
    parts]` times `work_size`; `faults` int64 `[rows, parts]`.
    """
    for index in numba.prange(rows * parts):
        attend_part(
            np.int64(index), like, query, query_b, query_h, query_g, keys, tokens, keys_b, keys_h, keys_n, values,
            values_b, values_h, values_n, indices, count, scale, kv_heads, heads, dim, parts, partial, weights, work,
            faults,
        )  # fmt: skip
    for row in range(rows):
        put_together(row, heads, dim, parts, partial, weights, out)
    return not at(faults, rows * parts, I64).any()
