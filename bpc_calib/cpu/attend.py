"""Step 4: exact attention over the tokens chosen, read where they lie."""

import numba
import numpy as np

from bpc_calib.cpu.language import at, compiled, float_of, inlined, prefetch, widen

__all__ = ["attend_kernel"]

CHUNK = 64  # tokens whose weights are made at once
AHEAD = 10  # tokens whose keys are asked for before they are needed
F32, I64 = np.empty(0, np.float32), np.empty(0, np.int64)
LOG2E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.1219444e-4)
LEAST = np.float32(-87)  # e^-87 is next to nothing, and still a normal number
FAST = {"reassoc", "contract", "nsz"}  # sums in any order; infinities stay what they are


@inlined(fastmath={"contract"})
def exponentials(x):
    """`e^x` of float32 in place, for x of at most 0, to 2 units in the last place: what compiles to whole vectors."""
    for i in range(len(x)):
        # 2^n e^r with r in [-ln 2 / 2, ln 2 / 2], ln 2 in two parts, and the Taylor series of the latter.
        given = max(x[i], LEAST)
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
def ask(address, line):
    """Have a row on its way to the cache."""
    for byte in range(0, line, 64):
        prefetch(address + byte)


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


@inlined(fastmath=FAST)
def multiply(like, keys, keys_n, values, values_n, listed, begin, count, dim, asked, logits):
    """Logits `[4, CHUNK]` of the keys listed from `begin` on with the queries of 4 heads, `asked [4, dim]`.

    On the way the values of these tokens are asked for, if given, and the keys that come soon.
    """
    a, b, c, d = asked[0], asked[1], asked[2], asked[3]
    for i in range(count):
        if values:
            ask(values + values_n * listed[begin + i], dim * like.itemsize)
            ask(keys + keys_n * listed[min(begin + i + AHEAD, len(listed) - 1)], dim * like.itemsize)
        key = at(keys + keys_n * listed[begin + i], dim, like)
        product_a, product_b, product_c, product_d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for j in range(dim):
            number = widen(key[j])
            product_a += a[j] * number
            product_b += b[j] * number
            product_c += c[j] * number
            product_d += d[j] * number
        logits[0, i], logits[1, i], logits[2, i], logits[3, i] = product_a, product_b, product_c, product_d


@inlined(fastmath=FAST)
def weigh(logits, count, most, total, sums):
    """Make the logits `[heads, CHUNK]` weights, and what was summed before comparable with them."""
    for g in range(len(logits)):
        mine = logits[g]
        largest = most[g]
        for i in range(count):
            largest = max(largest, mine[i])
        if largest > most[g]:
            down = np.exp(most[g] - largest)
            most[g] = largest
            total[g] *= down
            for d in range(sums.shape[1]):
                sums[g, d] *= down
        for i in range(count):
            mine[i] -= largest
        exponentials(mine[:count])
        mine[count:] = 0
        for i in range(count):
            total[g] += mine[i]


@inlined(fastmath=FAST)
def add(like, values, values_n, listed, begin, count, dim, weights, sums):
    """The values listed, weighed by `weights [4, CHUNK]`, added to `sums [4, dim]`: 4 values at once."""
    last = begin + count - 1
    for i in range(0, count, 4):
        one = at(values + values_n * listed[begin + i], dim, like)
        two = at(values + values_n * listed[min(begin + i + 1, last)], dim, like)
        three = at(values + values_n * listed[min(begin + i + 2, last)], dim, like)
        four = at(values + values_n * listed[min(begin + i + 3, last)], dim, like)
        for g in range(4):
            a, b, c, d = weights[g, i], weights[g, i + 1], weights[g, i + 2], weights[g, i + 3]
            for j in range(dim):
                sums[g, j] += a * widen(one[j]) + b * widen(two[j]) + c * widen(three[j]) + d * widen(four[j])


@inlined(fastmath=FAST)
def attend_part(
    task, like, query, query_b, query_h, query_g, keys, tokens, keys_b, keys_h, keys_n, values, values_b, values_h,
    values_n, indices, count, scale, kv_heads, heads, dim, parts, partial, weights, faults,
):  # fmt: skip
    """What one thread does of `attend_kernel`."""
    size = like.itemsize
    share = (count + parts - 1) // parts
    row, part = task // parts, task % parts
    b, h = row // kv_heads, row % kv_heads
    fours = (heads + 3) // 4 * 4
    asked, sums = np.zeros((fours, dim), np.float32), np.zeros((fours, dim), np.float32)
    for g in range(heads):
        given = at(query + size * (b * query_b + h * query_h + g * query_g), dim, like)
        for d in range(dim):
            asked[g, d] = widen(given[d]) * np.float32(scale)
    most, total = np.full(fours, np.float32(-np.inf)), np.zeros(fours, np.float32)
    logits = np.empty((fours, CHUNK), np.float32)
    room = np.empty(share, np.int64)
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
                asked[g : g + 4], logits[g : g + 4],
            )  # fmt: skip
        weigh(logits, some, most, total, sums)
        for g in range(0, fours, 4):
            add(like, values, size * values_n, listed, begin, some, dim, logits[g : g + 4], sums[g : g + 4])
    at(partial + 4 * task * heads * dim, heads * dim, F32)[:] = sums[:heads].ravel()
    at(weights + 8 * task * heads, heads, F32)[:] = most[:heads]
    at(weights + 8 * task * heads + 4 * heads, heads, F32)[:] = total[:heads]


@inlined(fastmath=FAST)
def put_together(row, heads, dim, parts, partial, weights, out):
    """float32 `[heads, dim]` of a row, of what its parts left; 0 where nothing was attended."""
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
                sums = at(partial + 4 * (part * heads + g) * dim, dim, F32)
                for d in range(dim):
                    mine[d] += down * sums[d]
        if total != 0:
            for d in range(dim):
                mine[d] /= total


@compiled(parallel=True)
def attend_kernel(
    like, query, query_b, query_h, query_g, keys, tokens, keys_b, keys_h, keys_n, values, values_b, values_h, values_n,
    indices, count, scale, rows, kv_heads, heads, dim, parts, partial, weights, faults, out,
):  # fmt: skip
    """Softmax attention over each list, in `parts` shares; whether all indices were those of tokens.

    On the way: `partial` float32 `[rows, parts, heads, dim]`, sums of values weighed by exponentials; `weights` float32
    `[rows, parts, 2, heads]`, the largest logit and the sum of the exponentials; `faults` int64 `[rows, parts]`.
    """
    for index in numba.prange(rows * parts):
        attend_part(
            np.int64(index), like, query, query_b, query_h, query_g, keys, tokens, keys_b, keys_h, keys_n, values,
            values_b, values_h, values_n, indices, count, scale, kv_heads, heads, dim, parts, partial, weights, faults,
        )  # fmt: skip
    for row in range(rows):
        put_together(row, heads, dim, parts, partial, weights, out)
    return not at(faults, rows * parts, I64).any()
