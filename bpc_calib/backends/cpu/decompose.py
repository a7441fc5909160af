"""The decomposition of one head's keys: `bpc_calib.method.decomposition` without a copy of its residual.

The residual is `R = (K - mean) L - U P`, so products and sums of its rows follow from those of the keys as they are in
memory, two bytes per number: `R v = K w - mean w - U (P v)` with `w = L v`, and `u R = (u K - (sum of u) mean) L -
(u U) P`. Within the steps of a bit, only keys whose sign changed add to `u K`. `u U` counts bits. Signs follow products
`K w` in float32 where a bound on their rounding proves them, and float64 for the few other keys.
"""

import numpy as np

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.language import at, lowest, ones, prefetch, widen
from bpc_calib.backends.cpu.wide import add_row, dot_row, dot_rows

__all__ = ["WORD", "decompose_kernel"]

WORD = 64  # keys per word of a plane: the signs of one bit
ONE = np.uint64(1)
UNIT = 2.0**-24  # the relative rounding error of float32
SLACK = 1e-12  # more than the rounding of float64
AHEAD = 32  # rows between the one that is read and the one that is fetched
SMALL, LARGE = 1e-30, 1e30  # far from where float32 underflows and overflows


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
def length(key):
    total = 0.0
    for d in range(len(key)):
        number = np.float64(widen(key[d]))
        total += number * number
    return np.sqrt(total)


@inlined
def explained(tables, used, code):
    """The part of a key's product with the direction that its bits so far explain."""
    total = 0.0
    for b in range(used):
        byte = (code[b >> 3] >> np.uint64(8 * (b & 7))) & np.uint64(255)
        total += tables[b, np.int64(byte)]
    return total


@inlined
def new_signs(like, keys, dim, lengths, direction, tables, used, codes, near, known):
    """The signs of the products of `WORD` keys with the residual's direction, as one word.

    `direction` is: addresses of the weights in float64 and in float32, the product with the mean, and what bounds the
    rounding of a product in float32 when it is multiplied by the length of the key. `near` and `known` are `[WORD]` to
    work with: products in float32, and what the bits so far explain of the products.
    """
    weights, single, offset, error = direction
    for x in range(0, WORD, 4):
        for ahead in range(0, 4 * dim * like.itemsize, 64):
            prefetch(keys + (x + AHEAD) * dim * like.itemsize + ahead)
        dot_rows(like, keys + x * dim * like.itemsize, single, dim, near.ctypes.data + 4 * x)
    for x in range(WORD):
        known[x] = offset + explained(tables, used, codes[x])
    signs = doubtful = np.uint64(0)
    for x in range(WORD):
        product, bound = np.float64(near[x]) - known[x], error * lengths[x]
        sure = (abs(product) > bound + SLACK * abs(known[x]) + SMALL) & (bound < LARGE)
        signs |= np.uint64(product >= 0.0) << np.uint64(x)
        doubtful |= np.uint64(not sure) << np.uint64(x)
    while doubtful:
        x = np.int64(lowest(doubtful))
        place = ONE << np.uint64(x)
        product = dot_row(like, keys + x * dim * like.itemsize, weights, dim)
        signs = signs | place if product >= known[x] else signs & ~place
        doubtful &= doubtful - ONE
    return signs


@inlined
def add_changed(like, keys, dim, before, after, sums):
    """Add to `sums` twice every key whose sign became positive, and subtract twice the others that changed."""
    changed = before ^ after
    while changed:
        x = lowest(changed)
        row = keys + np.int64(x) * dim * like.itemsize
        add_row(like, row, 2.0 if (after >> x) & ONE else -2.0, sums.ctypes.data, dim)
        changed &= changed - ONE


@compiled
def decompose_kernel(like, keys, count, mean, root, draws, iterations, projection):
    """Find `projection` `[bits, dim]`, in the space of `K L`, for keys `[count, dim]` at an address.

    Rows of zeros fill the keys up to a multiple of `WORD`. All other arrays are float64: `mean` `[dim]`, `root`
    `[dim, dim]`, `draws` `[bits, dim]`.
    """
    bits, dim = draws.shape
    words = (count + WORD - 1) // WORD
    planes = np.zeros((bits, words), np.uint64)
    codes = np.zeros((words * WORD, (bits + 63) // 64), np.uint64)
    tables = np.empty((bits // 8, 256))
    everything, sums, part = np.zeros(dim), np.empty(dim), np.empty(dim)
    weights, single, products = np.empty(dim), np.empty(dim, np.float32), np.empty(bits)
    lengths, near, known = np.zeros(words * WORD), np.empty(WORD, np.float32), np.empty(WORD)
    positive = np.empty(words, np.uint64)
    for word in range(words):
        here = min(WORD, count - word * WORD)
        positive[word] = ~np.uint64(0) >> np.uint64(WORD - here)
        part[:] = 0.0
        for x in range(here):
            row = keys + (word * WORD + x) * dim * like.itemsize
            add_row(like, row, 1.0, part.ctypes.data, dim)
            lengths[word * WORD + x] = length(at(row, dim, like))
        everything += part
    for bit in range(bits):
        plane, direction = planes[bit], projection[bit]
        plane[:] = positive
        sums[:] = everything
        direction[:] = draws[bit]
        used = (bit + 7) // 8
        for _ in range(iterations):
            offset, squares = 0.0, 0.0
            for d in range(dim):
                weights[d] = 0.0
                for e in range(dim):
                    weights[d] += root[d, e] * direction[e]
                offset += mean[d] * weights[d]
                squares += weights[d] * weights[d]
                single[d] = weights[d]
            # A float32 product of `dim` numbers, with weights that were rounded, is off by at most so much.
            error = (dim + 4) * UNIT * np.sqrt(squares)
            step = (weights.ctypes.data, single.ctypes.data, offset, error)
            for j in range(bit):
                products[j] = 0.0
                for d in range(dim):
                    products[j] += projection[j, d] * direction[d]
            fill_tables(tables, products[:bit])
            for word in range(words):
                first = word * WORD
                block = keys + first * dim * like.itemsize
                signs = new_signs(
                    like, block, dim, lengths[first : first + WORD], step, tables, used, codes[first : first + WORD],
                    near, known,
                ) & positive[word]  # fmt: skip
                part[:] = 0.0
                add_changed(like, block, dim, plane[word], signs, part)
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
