"""Product codes: what every centroid adds to the score of a query, and the sums of that over the codes of keys."""

import numpy as np

from bpc_calib.backends.cpu.compiling import inlined
from bpc_calib.backends.cpu.constants import CENTROIDS, LARGEST_SCORE
from bpc_calib.backends.cpu.language import at, prefetch_row
from bpc_calib.backends.cpu.widening import element_size, widen_row

__all__ = ["add_up", "prep_product_row"]

AT_ONCE = 256  # keys whose sums are split into heads together

F32, I16, I32, U8, U64 = (np.empty(0, kind) for kind in (np.float32, np.int16, np.int32, np.uint8, np.uint64))


@inlined(fastmath={"reassoc", "contract"})
def project_queries(b, h, size, step):
    """Queries times the rows of W, float32 `[heads, dim]`."""
    heads, dim = step.heads, step.dim
    wide, line = np.empty(heads * dim, np.float32), np.empty(dim, np.float32)
    for g in range(heads):
        query = step.query + size * (b * step.query_b + h * step.query_h + g * step.query_g)
        widen_row(query, step.element, wide[g * dim : (g + 1) * dim])
    start = step.projection + size * (b * step.projection_b + h * step.projection_h)
    prefetch_row(start, size * dim * dim)  # the cache holds another layer's
    projected = np.empty(heads * dim, np.float32)
    for j in range(dim):
        widen_row(start + size * j * step.projection_n, step.element, line)
        for g in range(heads):
            product = np.float32(0)
            for d in range(dim):
                product += wide[g * dim + d] * line[d]
            projected[g * dim + j] = product
    return projected


@inlined(fastmath={"contract"})
def make_tables(projected, begin, parts, size, step):
    """Products with all centroids, float32 `[heads, parts, 256]`."""
    heads, dim = step.heads, step.dim
    width = dim // parts
    prefetch_row(begin, size * dim * CENTROIDS)
    tables = np.zeros(heads * parts * CENTROIDS, np.float32)
    line = np.empty(CENTROIDS, np.float32)
    for j in range(parts):
        for i in range(width):
            widen_row(begin + size * CENTROIDS * (j * width + i), step.element, line)
            for g in range(heads):
                number = projected[g * dim + j * width + i]
                table = tables[(g * parts + j) * CENTROIDS : (g * parts + j + 1) * CENTROIDS]
                for c in range(CENTROIDS):
                    table[c] += number * line[c]
    return tables


@inlined(fastmath={"nnan", "nsz", "reassoc"})
def longest(numbers):
    """The largest absolute value of `[256]`."""
    most = np.float32(0)
    for c in range(CENTROIDS):
        most = max(most, abs(numbers[c]))
    return most


@inlined(fastmath={"nnan", "nsz"})
def round_all(exact, inverse, rounded):
    """Rounds half to even, and to at most `LARGEST_SCORE`."""
    for i in range(len(exact)):
        number = np.rint(exact[i] * inverse)
        rounded[i] = np.int16(np.int32(min(LARGEST_SCORE, max(-LARGEST_SCORE, number))))


@inlined
def prep_product_row(row, step):
    """`quantize_query` of a row for product codes, and its tables: `totals` holds what makes all entries 0 or more."""
    b, h = row // step.kv_heads, row % step.kv_heads
    heads, parts = step.heads, step.bits // 8
    fours, size = (heads + 3) // 4, element_size(step.element)
    centroids = step.centroids + size * (b * step.centroids_b + h * step.centroids_h)
    exact = make_tables(project_queries(b, h, size, step), centroids, parts, size, step)
    largest = np.float32(0)
    for g in range(heads):
        reach = np.float32(0)
        for j in range(parts):
            reach += longest(exact[(g * parts + j) * CENTROIDS : (g * parts + j + 1) * CENTROIDS])
        largest = max(largest, reach)
    inverse = LARGEST_SCORE / largest if largest > 0 else np.float32(0)
    count = heads * parts * CENTROIDS
    rounded = at(step.values + 2 * row * count, count, I16)
    round_all(exact, inverse, rounded)
    at(step.scale + 4 * row, 1, F32)[0] = largest / LARGEST_SCORE
    totals = at(step.totals + 16 * row * fours, 4 * fours, I32)
    totals[:] = 0
    for four in range(fours):
        table = at(step.tables + 4 * step.table_size * (row * fours + four), parts * CENTROIDS, U64)
        table[:] = 0
        for lane in range(min(4, heads - 4 * four)):
            g = 4 * four + lane
            for j in range(parts):
                own = rounded[(g * parts + j) * CENTROIDS : (g * parts + j + 1) * CENTROIDS]
                least = np.int32(0)
                for c in range(CENTROIDS):
                    least = min(least, np.int32(own[c]))
                totals[g] += least
                entries = table[j * CENTROIDS : (j + 1) * CENTROIDS]
                for c in range(CENTROIDS):
                    entries[c] |= np.uint64(np.uint32(np.int32(own[c]) - least)) << np.uint64(16 * lane)


@inlined
def add_up(codes, words, parts, count, table, totals, out, stride):
    """Scores of `count` keys whose codes lie at an address, for 4 heads: int16 `[4, stride]` at `out`."""
    entries, least = at(table, parts * CENTROIDS, U64), at(totals, 4, I32)
    named = at(codes, 8 * words * count, U8)  # byte by byte: on a little-endian machine part `j` is byte `j`
    sums = np.empty(AT_ONCE, np.uint64)
    for begin in range(0, count, AT_ONCE):
        some = min(AT_ONCE, count - begin)
        if parts == 8:
            for i in range(some):
                first, total = np.uint64(8 * (begin + i)), np.uint64(0)
                for part in range(8):
                    total += entries[np.uint64(CENTROIDS * part) + np.uint64(named[first + np.uint64(part)])]
                sums[i] = total
        else:
            for i in range(some):
                first, total = np.uint64(8 * words * (begin + i)), np.uint64(0)
                for part in range(parts):
                    total += entries[np.uint64(CENTROIDS * part) + np.uint64(named[first + np.uint64(part)])]
                sums[i] = total
        for lane in range(4):
            row, shift, add = at(out + 2 * (lane * stride + begin), some, I16), np.uint64(16 * lane), least[lane]
            for i in range(some):
                row[i] = np.int16(np.int32((sums[i] >> shift) & np.uint64(0xFFFF)) + add)
