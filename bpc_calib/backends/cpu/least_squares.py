"""The products that least squares needs, of one head's keys: `U^T U` by counting bits, `U^T K` in blocks of keys.

Hashes in float64 as `bpc_calib.method.encoding` does: every sum that decides a sign has the same order.
"""

import numpy as np

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.decompose import WORD, agreement
from bpc_calib.backends.cpu.language import WIDE, at, widen
from bpc_calib.backends.cpu.wide import HEIGHT, tile

__all__ = ["norm_kernel", "products_kernel"]

F64 = np.empty(0, np.float64)


@inlined
def multiply(a, a_step, a_next, rows, b, b_step, columns, count, c, c_next):
    """Add a product to `[rows, columns]` at an address, by tiles: see `tile`."""
    for i in range(0, rows, HEIGHT):
        for j in range(0, columns, WIDE):
            tile(a + 8 * i * a_next, a_step, a_next, b + 8 * j, b_step, count, c + 8 * (i * c_next + j), c_next)


@inlined
def centre(like, keys, count, dim, mean, rows, columns):
    """Keys minus their mean as `rows` `[WORD, dim]` and as `columns` `[dim, WORD]`, 0 behind the last key."""
    for x in range(count):
        key = at(keys + x * dim * like.itemsize, dim, like)
        for d in range(dim):
            rows[x, d] = np.float64(widen(key[d])) - mean[d]
    rows[count:] = 0.0
    for x in range(WORD):
        for d in range(dim):
            columns[d, x] = rows[x, d]


@inlined
def greedy_word(running, gram, signs, bits):
    """The greedy pass over products `[bits, WORD]`, to minus the signs, `[bits, WORD]`."""
    width = running.shape[1]
    for i in range(0, bits, HEIGHT):
        for j in range(i, i + HEIGHT):
            for x in range(width):
                signs[j, x] = -1.0 if running[j, x] >= 0 else 1.0
            for k in range(j + 1, i + HEIGHT):
                for x in range(width):
                    running[k, x] += signs[j, x] * gram[j, k]
        rest = i + HEIGHT
        multiply(
            gram.ctypes.data + 8 * (i * bits + rest), bits, 1, bits - rest, signs.ctypes.data + 8 * i * width, width,
            width, HEIGHT, running.ctypes.data + 8 * rest * width, width,
        )  # fmt: skip


@compiled
def products_kernel(like, keys, count, mean, matrix, gram, squares, cross):
    """Write `U^T U` `[bits, bits]` and `U^T (K - mean)` `[bits, dim]` for keys `[count, dim]` at an address.

    All arrays are float64: `mean` `[dim]`, `matrix` `[dim, bits]`, `gram` `[bits, bits]`, as in an `Encoder`.
    """
    dim, bits = matrix.shape
    words = (count + WORD - 1) // WORD
    planes = np.zeros((bits, words), np.uint64)
    rows, columns = np.empty((WORD, dim)), np.empty((dim, WORD))
    running, signs = np.empty((bits, WORD)), np.empty((bits, WORD))
    cross[:] = 0.0
    for word in range(words):
        first = word * WORD
        here = min(WORD, count - first)
        centre(like, keys + first * dim * like.itemsize, here, dim, mean, rows, columns)
        running[:] = 0.0
        multiply(
            matrix.ctypes.data, bits, 1, bits, columns.ctypes.data, WORD, WORD, dim, running.ctypes.data, WORD
        )  # fmt: skip
        greedy_word(running, gram, signs, bits)
        for i in range(bits):
            plane = np.uint64(0)
            for x in range(here):
                plane |= np.uint64(signs[i, x] < 0) << np.uint64(x)
            planes[i, word] = plane
        multiply(
            signs.ctypes.data, 1, WORD, bits, rows.ctypes.data, dim, dim, WORD, cross.ctypes.data, dim
        )  # fmt: skip
    for i in range(bits):
        for d in range(dim):
            cross[i, d] = -cross[i, d]
        for j in range(i + 1):
            squares[i, j] = squares[j, i] = agreement(planes[i], planes[j], count)


@compiled
def norm_kernel(like, keys, count, mean, metric):
    """The sum of squared norms of keys minus their mean, in a metric `[dim, dim]`."""
    dim = len(metric)
    rows, columns, product = np.empty((WORD, dim)), np.empty((dim, WORD)), np.empty((dim, WORD))
    total = 0.0
    for first in range(0, count, WORD):
        here = min(WORD, count - first)
        centre(like, keys + first * dim * like.itemsize, here, dim, mean, rows, columns)
        product[:] = 0.0
        multiply(
            metric.ctypes.data, dim, 1, dim, columns.ctypes.data, WORD, WORD, dim, product.ctypes.data, WORD
        )  # fmt: skip
        part = 0.0
        for d in range(dim):
            for x in range(WORD):
                part += product[d, x] * columns[d, x]
        total += part
    return total
