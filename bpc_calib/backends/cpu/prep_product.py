"""Product codes: what every centroid adds to the score of a query, and the sums of that over the codes of keys."""

import numpy as np

from bpc_calib.backends.cpu.compiling import inlined
from bpc_calib.backends.cpu.constants import LARGEST_SCORE
from bpc_calib.backends.cpu.language import at, prefetch_row, widen

__all__ = ["add_up", "prep_product_row"]

CENTROIDS = 256
F32, I16, I32, I64, U64 = (np.empty(0, kind) for kind in (np.float32, np.int16, np.int32, np.int64, np.uint64))


@inlined(fastmath={"reassoc", "contract"})
def project_queries(b, h, like, step):
    """Queries times the rows of W, float32 `[heads, dim]`."""
    heads, dim, size = step.heads, step.dim, like.itemsize
    wide, line = np.empty(heads * dim, np.float32), np.empty(dim, np.float32)
    for g in range(heads):
        query = at(step.query + size * (b * step.query_b + h * step.query_h + g * step.query_g), dim, like)
        for d in range(dim):
            wide[g * dim + d] = widen(query[d])
    start = step.projection + size * (b * step.projection_b + h * step.projection_h)
    prefetch_row(start, size * dim * dim)  # the cache holds another layer's
    projected = np.empty(heads * dim, np.float32)
    for j in range(dim):
        direction = at(start + size * j * step.projection_n, dim, like)
        for d in range(dim):
            line[d] = widen(direction[d])
        for g in range(heads):
            product = np.float32(0)
            for d in range(dim):
                product += wide[g * dim + d] * line[d]
            projected[g * dim + j] = product
    return projected


@inlined(fastmath={"contract"})
def make_tables(projected, begin, parts, like, step):
    """Products with all centroids, float32 `[heads, parts, 256]`."""
    heads, dim, size = step.heads, step.dim, like.itemsize
    width = dim // parts
    prefetch_row(begin, size * dim * CENTROIDS)
    tables = np.zeros(heads * parts * CENTROIDS, np.float32)
    line = np.empty(CENTROIDS, np.float32)
    for j in range(parts):
        for i in range(width):
            along = at(begin + size * CENTROIDS * (j * width + i), CENTROIDS, like)
            for c in range(CENTROIDS):
                line[c] = widen(along[c])
            for g in range(heads):
                number = projected[g * dim + j * width + i]
                table = tables[(g * parts + j) * CENTROIDS : (g * parts + j + 1) * CENTROIDS]
                for c in range(CENTROIDS):
                    table[c] += number * line[c]
    return tables


@inlined
def prep_product_row(row, like, step):
    """`quantize_query` of a row for product codes, and its tables: `totals` holds what makes all entries 0 or more."""
    b, h = row // step.kv_heads, row % step.kv_heads
    heads, parts = step.heads, step.bits // 8
    fours = (heads + 3) // 4
    centroids = step.centroids + like.itemsize * (b * step.centroids_b + h * step.centroids_h)
    exact = make_tables(project_queries(b, h, like, step), centroids, parts, like, step)
    largest = np.float32(0)
    for g in range(heads):
        reach = np.float32(0)
        for j in range(parts):
            most = np.float32(0)
            for c in range((g * parts + j) * CENTROIDS, (g * parts + j + 1) * CENTROIDS):
                most = max(most, abs(exact[c]))
            reach += most
        largest = max(largest, reach)
    inverse = LARGEST_SCORE / largest if largest > 0 else np.float32(0)
    count = heads * parts * CENTROIDS
    rounded = at(step.values + 2 * row * count, count, I16)
    for i in range(count):
        rounded[i] = np.int16(min(LARGEST_SCORE, max(-LARGEST_SCORE, np.rint(exact[i] * inverse))))
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
                least = np.int64(0)
                for c in range(CENTROIDS):
                    least = min(least, np.int64(own[c]))
                totals[g] += least
                entries = table[j * CENTROIDS : (j + 1) * CENTROIDS]
                for c in range(CENTROIDS):
                    entries[c] |= np.uint64(np.int64(own[c]) - least) << np.uint64(16 * lane)


@inlined
def add_up(codes, words, parts, count, table, totals, out, stride):
    """Scores of `count` keys whose codes lie at an address, for 4 heads: int16 `[4, stride]` at `out`."""
    entries, least = at(table, parts * CENTROIDS, U64), at(totals, 4, I32)
    a, b = at(out, count, I16), at(out + 2 * stride, count, I16)
    c, d = at(out + 4 * stride, count, I16), at(out + 6 * stride, count, I16)
    one, two, three, four = least[0], least[1], least[2], least[3]
    read = at(codes, count * words, I64)
    for i in range(count):
        total = np.uint64(0)
        for word in range(words):
            code = np.uint64(read[i * words + word])
            for part in range(8 * word, min(8 * word + 8, parts)):
                total += entries[CENTROIDS * part + np.int64(code & np.uint64(255))]
                code >>= np.uint64(8)
        a[i] = np.int16(np.int64(total & np.uint64(0xFFFF)) + one)
        b[i] = np.int16(np.int64((total >> np.uint64(16)) & np.uint64(0xFFFF)) + two)
        c[i] = np.int16(np.int64((total >> np.uint64(32)) & np.uint64(0xFFFF)) + three)
        d[i] = np.int16(np.int64(total >> np.uint64(48)) + four)
