"""Hashing: the greedy pass over products with the rows of the projection, many keys at once."""

from typing import NamedTuple

import numba
import numpy as np

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.gain import error_of, gain_of
from bpc_calib.backends.cpu.language import at, prefetch_row, widen

__all__ = ["SIDE", "Hashing", "greedy_kernel", "hash_kernel", "hash_row"]

SIDE = 64  # keys at once
F32, I64, U8 = np.empty(0, np.float32), np.empty(0, np.int64), np.empty(0, np.uint8)


@inlined
def pass_many(given, matrix, count, bits, signs, dot, fallen):
    """The greedy pass for many keys at once: signs `[bits, SIDE]`, products with the code, squared errors."""
    running = np.zeros((bits, SIDE), np.float32)
    for x in range(count):
        for j in range(bits):
            running[j, x] = given[x * bits + j]
    for i in range(bits):
        for x in range(SIDE):
            signs[i, x] = np.float32(1) if running[i, x] >= 0 else np.float32(-1)
        for j in range(i + 1, bits):
            entry = matrix[i * bits + j]
            for x in range(SIDE):
                running[j, x] -= signs[i, x] * entry
        own = matrix[i * bits + i]
        for x in range(SIDE):
            fallen[x] -= np.float32(2) * abs(running[i, x]) - own
        for x in range(count):
            dot[x] += signs[i, x] * given[x * bits + i]


@inlined
def pass_one(given, matrix, bits, signs, dot, fallen):
    """The same for one key, along the rows of the matrix."""
    running = given.copy()
    for i in range(bits):
        sign = np.float32(1) if running[i] >= 0 else np.float32(-1)
        for j in range(i + 1, bits):
            running[j] -= sign * matrix[i * bits + j]
        signs[i, 0] = sign
        fallen[0] -= np.float32(2) * abs(running[i]) - matrix[i * bits + i]
        dot[0] += sign * given[i]


@inlined
def greedy(given, norm, matrix, count, bits, codes, errors, gains):
    """`encode_gram` of float32 products `[count, bits]` of at most `SIDE` keys, every sum in the same order."""
    words, side = (bits + 63) // 64, 1 if count == 1 else SIDE
    signs, dot, fallen = np.empty((bits, side), np.float32), np.zeros(side, np.float32), np.zeros(side, np.float32)
    fallen[:count] = norm
    if count == 1:
        pass_one(given, matrix, bits, signs, dot, fallen)
    else:
        pass_many(given, matrix, count, bits, signs, dot, fallen)
    codes[:] = 0
    for i in range(bits):
        for x in range(count):
            codes[x * words + i // 64] |= np.int64(signs[i, x] > 0) << (i % 64)
    for x in range(count):
        errors[x], gains[x] = error_of(fallen[x]), gain_of(norm[x], dot[x])


@inlined
def greedy_block(task, blocks, scores, norms, gram, gram_stride, tokens, bits, codes, errors, gains):
    """One of the `blocks` of a row."""
    words = (bits + 63) // 64
    row, first = task // blocks, task % blocks * SIDE
    count, begin = min(SIDE, tokens - first), row * tokens + first
    greedy(
        at(scores + 4 * begin * bits, count * bits, F32), at(norms + 4 * begin, count, F32),
        at(gram + 4 * row * gram_stride, bits * bits, F32), count, bits,
        at(codes + 8 * begin * words, count * words, I64), at(errors + 4 * begin, count, F32),
        at(gains + begin, count, U8),
    )  # fmt: skip


@compiled(parallel=True)
def greedy_kernel(scores, norms, gram, gram_stride, rows, tokens, bits, codes, errors, gains):
    """The greedy pass over float32 products `[rows, tokens, bits]`."""
    blocks = (tokens + SIDE - 1) // SIDE
    for index in numba.prange(rows * blocks):
        greedy_block(np.int64(index), blocks, scores, norms, gram, gram_stride, tokens, bits, codes, errors, gains)


@inlined(fastmath={"reassoc", "contract"})
def project(wide, matrix, metric, scores):
    """Products `[H]` of a centred key with rows `[H, D]`; its squared norm, in a metric `[D, D]` if there is one."""
    dim = len(wide)
    for j in range(len(scores)):
        product = np.float32(0)
        for d in range(dim):
            product += wide[d] * matrix[j * dim + d]
        scores[j] = product
    norm = np.float32(0)
    for i in range(dim if len(metric) else 1):
        product = np.float32(0)
        if len(metric):
            for d in range(dim):
                product += wide[d] * metric[i * dim + d]
            norm += wide[i] * product
        else:
            for d in range(dim):
                norm += wide[d] * wide[d]
    return norm


class Hashing(NamedTuple):
    """What `hash_kernel` works on: sizes, and addresses with strides in elements, as in `Step`; `_n` are tokens.

    `_stride` is over rows. `matrix`, `gram`, `metric` and `mean` are float32; their stride is 0 where all rows share
    one, and `metric` and `mean` may be the address 0.
    """

    keys: int
    keys_b: int
    keys_h: int
    keys_n: int
    matrix: int
    matrix_stride: int
    gram: int
    gram_stride: int
    metric: int
    metric_stride: int
    mean: int
    mean_stride: int

    rows: int
    kv_heads: int
    tokens: int
    dim: int
    bits: int

    codes: int  # int64 [tokens, words] of each row
    codes_stride: int
    errors: int  # float32 [tokens] of each row
    errors_stride: int
    gains: int  # uint8 [tokens] of each row
    gains_stride: int


@inlined
def centre_key(key, mean, wide):
    """The key in float32, less the mean `[D]`, or `[0]` where there is none."""
    for d in range(len(wide)):
        wide[d] = widen(key[d])
    if len(mean):
        for d in range(len(wide)):
            wide[d] -= mean[d]


@inlined
def hash_row(row, like, call):
    """All keys of a row."""
    size, tokens, dim, bits = like.itemsize, call.tokens, call.dim, call.bits
    words = (bits + 63) // 64
    matrix, gram = call.matrix + 4 * row * call.matrix_stride, call.gram + 4 * row * call.gram_stride
    metric = call.metric + 4 * row * call.metric_stride
    prefetch_row(matrix, 4 * bits * dim)  # the cache holds another layer's
    if call.metric:
        prefetch_row(metric, 4 * dim * dim)
    prefetch_row(gram, 4 * bits * bits)
    directions = at(matrix, bits * dim, F32)
    measure = at(metric, dim * dim if call.metric else 0, F32)
    centre = at(call.mean + 4 * row * call.mean_stride, dim if call.mean else 0, F32)
    scores, norms, wide = np.empty(tokens * bits, np.float32), np.empty(tokens, np.float32), np.empty(dim, np.float32)
    keys = call.keys + size * (row // call.kv_heads * call.keys_b + row % call.kv_heads * call.keys_h)
    for i in range(tokens):
        centre_key(at(keys + size * i * call.keys_n, dim, like), centre, wide)
        norms[i] = project(wide, directions, measure, scores[i * bits : (i + 1) * bits])
    greedy(
        scores, norms, at(gram, bits * bits, F32), tokens, bits,
        at(call.codes + 8 * row * call.codes_stride, tokens * words, I64),
        at(call.errors + 4 * row * call.errors_stride, tokens, F32),
        at(call.gains + row * call.gains_stride, tokens, U8),
    )  # fmt: skip


@compiled(parallel=True)
def hash_kernel(like, fields):
    """`encode_with` for at most `SIDE` tokens, for a `Hashing` given as a plain tuple and a symmetric metric."""
    call = Hashing(*fields)
    for index in numba.prange(call.rows):
        hash_row(np.int64(index), like, call)
