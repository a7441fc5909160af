"""Step 4: exact attention over the tokens chosen, read where they lie."""

import numba
import numpy as np

from bpc_calib.cpu.language import at, compiled, float_of, inlined, prefetch, widen

__all__ = ["attend_kernel"]

CHUNK = 64  # tokens whose weights are made at once
AHEAD = 8  # tokens asked for before they are needed
F32, I64 = np.empty(0, np.float32), np.empty(0, np.int64)
LOG2E = np.float32(1.4426950408889634)


@inlined(fastmath={"contract"})
def exponentials(x):
    """`e^x` of float32 in place, for x of at most 0, to 2 units in the last place: what compiles to whole vectors."""
    for i in range(len(x)):
        # 2^n 2^f with f in [-1/2, 1/2], and the Taylor series of the latter.
        power = max(x[i] * LOG2E, np.float32(-126))
        whole = np.rint(power)
        f = power - whole
        series = np.float32(1.5403530393381609e-4)
        series = series * f + np.float32(1.3333558146428443e-3)
        series = series * f + np.float32(9.618129107628477e-3)
        series = series * f + np.float32(5.550410866482158e-2)
        series = series * f + np.float32(2.402265069591007e-1)
        series = series * f + np.float32(6.931471805599453e-1)
        series = series * f + np.float32(1)
        x[i] = series * float_of(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@inlined(fastmath={"reassoc", "contract", "nsz"})
def attend_part(
    task, like, query, query_b, query_h, query_g, keys, keys_b, keys_h, keys_n, values, values_b, values_h, values_n,
    indices, count, scale, kv_heads, heads, dim, parts, partial, weights,
):  # fmt: skip
    size = like.itemsize
    share = (count + parts - 1) // parts
    line = size * dim
    row, part = task // parts, task % parts
    b, h = row // kv_heads, row % kv_heads
    listed = at(indices + 8 * row * count, count, I64)
    asked = np.empty(heads * dim, np.float32)
    for g in range(heads):
        given = at(query + 4 * (b * query_b + h * query_h + g * query_g), dim, F32)
        for d in range(dim):
            asked[g * dim + d] = given[d] * np.float32(scale)
    sums = at(partial + 4 * task * heads * dim, heads * dim, F32)
    sums[:] = 0
    most = at(weights + 8 * task * heads, heads, F32)
    total = at(weights + 8 * task * heads + 4 * heads, heads, F32)
    most[:] = -np.inf
    total[:] = 0
    logits = np.empty(heads * CHUNK, np.float32)
    wide = np.empty(dim, np.float32)
    first_key = keys + size * (b * keys_b + h * keys_h)
    first_value = values + size * (b * values_b + h * values_h)
    end = min(count, part * share + share)
    while end > part * share and listed[end - 1] < 0:
        end -= 1
    for begin in range(part * share, end, CHUNK):
        some = min(CHUNK, end - begin)
        for i in range(some):
            if begin + i + AHEAD < end:
                soon = listed[begin + i + AHEAD]
                for byte in range(0, line, 64):
                    prefetch(first_key + size * soon * keys_n + byte)
            key = at(first_key + size * listed[begin + i] * keys_n, dim, like)
            for d in range(dim):
                wide[d] = widen(key[d])
            soon = listed[begin + i]
            for byte in range(0, line, 64):
                prefetch(first_value + size * soon * values_n + byte)
            for g in range(heads):
                product = np.float32(0)
                for d in range(dim):
                    product += asked[g * dim + d] * wide[d]
                logits[g * CHUNK + i] = product
        for g in range(heads):
            mine = logits[g * CHUNK : g * CHUNK + some]
            largest = most[g]
            for i in range(some):
                largest = max(largest, mine[i])
            if largest > most[g]:
                down = np.exp(most[g] - largest)
                most[g] = largest
                total[g] *= down
                for d in range(dim):
                    sums[g * dim + d] *= down
            for i in range(some):
                mine[i] -= largest
            exponentials(mine)
            for i in range(some):
                total[g] += mine[i]
        for i in range(some):
            value = at(first_value + size * listed[begin + i] * values_n, dim, like)
            for d in range(dim):
                wide[d] = widen(value[d])
            for g in range(heads):
                weight = logits[g * CHUNK + i]
                for d in range(dim):
                    sums[g * dim + d] += weight * wide[d]


@compiled(parallel=True)
def attend_kernel(
    like, query, query_b, query_h, query_g, keys, keys_b, keys_h, keys_n, values, values_b, values_h, values_n,
    indices, count, scale, rows, kv_heads, heads, dim, parts, partial, weights,
):  # fmt: skip
    """Softmax attention of float32 queries over `parts` shares of each list, to be put together by `reduce`.

    `partial` has float32 `[rows, parts, heads, dim]`, sums of values weighed by exponentials; `weights` float32
    `[rows, parts, 2, heads]`, the largest logit and the sum of the exponentials.
    """
    for index in numba.prange(rows * parts):
        attend_part(
            np.int64(index), like, query, query_b, query_h, query_g, keys, keys_b, keys_h, keys_n, values, values_b,
            values_h, values_n, indices, count, scale, kv_heads, heads, dim, parts, partial, weights,
        )  # fmt: skip


@compiled(fastmath={"reassoc", "contract", "nsz"})
def reduce_kernel(partial, weights, out, rows, parts, heads, dim):
    """float32 `[rows, heads, dim]` of what `attend_kernel` left."""
    for row in range(rows):
        for g in range(heads):
            mine = at(out + 4 * (row * heads + g) * dim, dim, F32)
            mine[:] = 0
            largest, total = np.float32(-np.inf), np.float32(0)
            for part in range(parts):
                largest = max(largest, at(weights + 8 * (row * parts + part) * heads, heads, F32)[g])
            for part in range(parts):
                left = at(weights + 8 * (row * parts + part) * heads, 2 * heads, F32)
                if left[heads + g] > 0:
                    down = np.exp(left[g] - largest)
                    total += down * left[heads + g]
                    sums = at(partial + 4 * ((row * parts + part) * heads + g) * dim, dim, F32)
                    for d in range(dim):
                        mine[d] += down * sums[d]
            for d in range(dim):
                mine[d] /= total
