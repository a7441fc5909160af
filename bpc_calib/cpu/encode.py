"""Hashing: the greedy pass over products with the rows of the projection, for many keys side by side."""

import numba
import numpy as np

from bpc_calib.cpu.language import at, compiled, inlined

__all__ = ["SIDE", "greedy_kernel"]

SIDE = 64  # keys side by side
F32, I64, U8 = np.empty(0, np.float32), np.empty(0, np.int64), np.empty(0, np.uint8)


@inlined
def greedy_block(task, blocks, scores, norms, gram, gram_r, tokens, bits, codes, errors, gains):
    words = (bits + 63) // 64
    row, first = task // blocks, task % blocks * SIDE
    count = min(SIDE, tokens - first)
    given = at(scores + 4 * (row * tokens + first) * bits, count * bits, F32)
    matrix = at(gram + 4 * row * gram_r, bits * bits, F32)
    running, signs = np.zeros((bits, SIDE), np.float32), np.empty((bits, SIDE), np.float32)
    for x in range(count):
        for j in range(bits):
            running[j, x] = given[x * bits + j]
    dot, fallen = np.zeros(SIDE, np.float32), np.zeros(SIDE, np.float32)
    norm = at(norms + 4 * (row * tokens + first), count, F32)
    for x in range(count):
        fallen[x] = norm[x]
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
    packed = at(codes + 8 * (row * tokens + first) * words, count * words, I64)
    packed[:] = 0
    for i in range(bits):
        for x in range(count):
            packed[x * words + i // 64] |= np.int64(signs[i, x] > 0) << (i % 64)
    error = at(errors + 4 * (row * tokens + first), count, F32)
    gain = at(gains + row * tokens + first, count, U8)
    for x in range(count):
        error[x] = np.float32(np.sqrt(np.float64(max(fallen[x], np.float32(0)))))
        byte = np.float32(255)
        if norm[x] <= 0:
            byte = np.float32(32)
        elif dot[x] > 0:
            byte = np.rint(np.float32(64) * norm[x] / dot[x] - np.float32(32))
        gain[x] = np.uint8(min(np.float32(255), max(np.float32(0), byte)))


@compiled(parallel=True)
def greedy_kernel(scores, norms, gram, gram_r, rows, tokens, bits, codes, errors, gains):
    """`encode_gram` of float32 products `[rows, tokens, bits]`, every sum in the same order."""
    blocks = (tokens + SIDE - 1) // SIDE
    for index in numba.prange(rows * blocks):
        greedy_block(np.int64(index), blocks, scores, norms, gram, gram_r, tokens, bits, codes, errors, gains)
