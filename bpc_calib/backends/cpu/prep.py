"""Step 1: the queries projected and rounded to int8, and the tables that scoring reads."""

import numpy as np

from bpc_calib.backends.cpu.compiling import inlined
from bpc_calib.backends.cpu.constants import LARGEST_QUERY
from bpc_calib.backends.cpu.dots import LANES
from bpc_calib.backends.cpu.language import at, prefetch
from bpc_calib.backends.cpu.widening import element_size, widen_row

__all__ = ["prep_row", "table_size"]

F32, I8, I32, U64 = (np.empty(0, kind) for kind in (np.float32, np.int8, np.int32, np.uint64))


def table_size(words: int) -> int:
    """int32 in the table of 4 heads."""
    return words * 64 if LANES else words * 8 * 256 * 2


@inlined
def fill_bytes(values, heads, bits, words, table):
    """For products of bytes, see `dots`: `table [words, 2, 8, 4]` of int8 `[heads, bits]`."""
    for place in range(words * 64):
        head, shift, half = place & 3, (place >> 2) & 7, place >> 5
        packed = 0
        for i in range(4):
            bit = 32 * half + 8 * i + shift
            if head < heads and bit < bits:
                packed |= (np.int64(values[head * bits + bit]) & 255) << (8 * i)
        table[place] = np.int32(np.uint32(packed))


@inlined
def fill_sums(values, heads, bits, words, table):
    """For sums by look-up: uint64 `[words * 8, 256]`, 16 bits per head, what a byte of a code adds; never negative."""
    for part in range(words * 8):
        lowest = np.uint64(0)
        steps = np.zeros(8, np.int64)
        for i in range(8):
            for head in range(heads):
                if 8 * part + i < bits:
                    value = np.int64(values[head * bits + 8 * part + i])
                    steps[i] += value << (16 * head)
                    if value < 0:
                        lowest += np.uint64(-value) << np.uint64(16 * head)
        table[256 * part] = lowest
        for i in range(8):
            for byte in range(1 << i):
                table[256 * part + (1 << i) + byte] = np.uint64(np.int64(table[256 * part + byte]) + steps[i])


@inlined(fastmath={"reassoc", "contract"})
def prep_row(row, step):
    """`quantize_query` of a row, the sums of its queries, and its tables."""
    b, h = row // step.kv_heads, row % step.kv_heads
    heads, bits, dim = step.heads, step.bits, step.dim
    fours = (heads + 3) // 4
    size = element_size(step.element)
    wide = np.empty(heads * dim, np.float32)
    for g in range(heads):
        query = step.query + size * (b * step.query_b + h * step.query_h + g * step.query_g)
        widen_row(query, step.element, wide[g * dim : (g + 1) * dim])
    start = step.projection + size * (b * step.projection_b + h * step.projection_h)
    for byte in range(0, size * bits * dim, 64):  # the cache holds another layer's
        prefetch(start + byte)
    projected = np.empty(heads * bits, np.float32)
    line = np.empty(dim, np.float32)
    largest = np.float32(0)
    for j in range(bits):
        widen_row(start + size * j * step.projection_n, step.element, line)
        for g in range(heads):
            product = np.float32(0)
            for d in range(dim):
                product += wide[g * dim + d] * line[d]
            projected[g * bits + j] = product
            largest = max(largest, abs(product))
    inverse = LARGEST_QUERY / largest if largest > 0 else np.float32(0)
    values = at(step.values + row * heads * bits, heads * bits, I8)
    totals = at(step.totals + 4 * row * 4 * fours, 4 * fours, I32)
    totals[:] = 0
    for g in range(heads):
        for j in range(bits):
            value = np.int32(min(LARGEST_QUERY, max(-LARGEST_QUERY, np.rint(projected[g * bits + j] * inverse))))
            values[g * bits + j] = value
            totals[g] += value
    at(step.scale + 4 * row, 1, F32)[0] = largest / LARGEST_QUERY
    for four in range(fours):
        rounded, count = values[4 * four * bits :], min(4, heads - 4 * four)
        table = step.tables + 4 * step.table_size * (row * fours + four)
        if LANES:
            fill_bytes(rounded, count, bits, step.words, at(table, step.table_size, I32))
        else:
            fill_sums(rounded, count, bits, step.words, at(table, step.table_size // 2, U64))
