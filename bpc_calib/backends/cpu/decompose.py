"""The decomposition of one head's keys: `bpc_calib.method.decomposition` without a copy of its residual.

The residual is `R = (K - mean) L - U P`, so products and sums of its rows follow from those of the keys as they are in
memory, two bytes per number: `R v = K w - mean w - U (P v)` with `w = L v`, and `u R = (u K - (sum of u) mean) L -
(u U) P`. Within the steps of a bit, only keys whose sign changed add to `u K`. `u U` counts bits.
"""

import numpy as np

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.language import lowest, ones
from bpc_calib.backends.cpu.wide import add_row, dot_row

__all__ = ["WORD", "decompose_kernel"]

WORD = 64  # keys per word of a plane: the signs of one bit
ONE = np.uint64(1)


@inlined
def agreement(one, two, count):
    """The sum of products of two vectors of signs, from their planes."""
    differ = np.int64(0)
    for word in range(len(one)):
        differ += ones(one[word] ^ two[word])
    return np.float64(count - 2 * differ)


@inlined
def fill_tables(tables, products):
    """All sums of 8 products with signs: `tables[b, byte]` for the products `8 b` to `8 b + 7`."""
    for b in range((len(products) + 7) // 8):
        table = tables[b]
        table[0] = 0.0
        for place in range(8):
            size, index = 1 << place, 8 * b + place
            product = products[index] if index < len(products) else 0.0
            for x in range(size):
                table[size + x] = table[x] + product
                table[x] -= product


@inlined
def new_signs(like, keys, first, count, dim, weights, offset, tables, used, codes):
    """The signs of the products of at most `WORD` keys with the residual's direction, as one word."""
    signs = np.uint64(0)
    for x in range(count):
        product = dot_row(like, keys + (first + x) * dim * like.itemsize, weights, dim) - offset
        explained = 0.0
        for b in range(used):
            byte = (codes[first + x, b >> 3] >> np.uint64(8 * (b & 7))) & np.uint64(255)
            explained += tables[b, np.int64(byte)]
        signs |= np.uint64(product >= explained) << np.uint64(x)
    return signs


@inlined
def add_changed(like, keys, first, dim, before, after, sums):
    """Add to `sums` twice every key whose sign became positive, and subtract twice the others that changed."""
    changed = before ^ after
    while changed:
        x = lowest(changed)
        row = keys + (first + np.int64(x)) * dim * like.itemsize
        add_row(like, row, 2.0 if (after >> x) & ONE else -2.0, sums.ctypes.data, dim)
        changed &= changed - ONE


@compiled
def decompose_kernel(like, keys, count, mean, root, draws, iterations, projection):
    """Find `projection` `[bits, dim]`, in the space of `K L`, for keys `[count, dim]` at an address.

    All other arrays are float64: `mean` `[dim]`, `root` `[dim, dim]`, `draws` `[bits, dim]`.
    """
    bits, dim = draws.shape
    words = (count + WORD - 1) // WORD
    planes = np.zeros((bits, words), np.uint64)
    codes = np.zeros((count, (bits + 63) // 64), np.uint64)
    tables = np.empty((bits // 8, 256))
    everything, sums, part = np.zeros(dim), np.empty(dim), np.empty(dim)
    weights, products = np.empty(dim), np.empty(bits)
    positive = np.empty(words, np.uint64)
    for word in range(words):
        here = min(WORD, count - word * WORD)
        positive[word] = ~np.uint64(0) >> np.uint64(WORD - here)
        part[:] = 0.0
        for x in range(here):
            add_row(like, keys + (word * WORD + x) * dim * like.itemsize, 1.0, part.ctypes.data, dim)
        everything += part
    for bit in range(bits):
        plane, direction = planes[bit], projection[bit]
        plane[:] = positive
        sums[:] = everything
        direction[:] = draws[bit]
        used = (bit + 7) // 8
        for _ in range(iterations):
            offset = 0.0
            for d in range(dim):
                weights[d] = 0.0
                for e in range(dim):
                    weights[d] += root[d, e] * direction[e]
                offset += mean[d] * weights[d]
            for j in range(bit):
                products[j] = 0.0
                for d in range(dim):
                    products[j] += projection[j, d] * direction[d]
            fill_tables(tables, products[:bit])
            for word in range(words):
                first = word * WORD
                here = min(WORD, count - first)
                signs = new_signs(
                    like, keys, first, here, dim, weights.ctypes.data, offset, tables, used, codes
                )  # fmt: skip
                part[:] = 0.0
                add_changed(like, keys, first, dim, plane[word], signs, part)
                sums += part
                plane[word] = signs
            total = agreement(plane, positive, count)
            for d in range(dim):
                direction[d] = 0.0
            for d in range(dim):
                centred = sums[d] - total * mean[d]
                for e in range(dim):
                    direction[e] += centred * root[d, e]
            for j in range(bit):
                common = agreement(plane, planes[j], count)
                for d in range(dim):
                    direction[d] -= common * projection[j, d]
            for d in range(dim):
                direction[d] /= count
        for i in range(count):
            codes[i, bit >> 6] |= ((plane[i // WORD] >> np.uint64(i % WORD)) & ONE) << np.uint64(bit & 63)
