"""Step 2: one ranked integer a key and KV head, from the codes alone.

Each head's best score is needed before a key can be ranked (`group_scores`), so the products are kept in between, as
int16, and every thread has its own share of the keys.
"""

import numba
import numpy as np

from bpc_calib.cpu.language import LANES, at, compiled, dots_1, dots_2, inlined

__all__ = ["BLOCK", "FORCED", "GROUP_CODES", "NEVER", "PAD", "score_kernel"]

FORCED = 1 << 28  # in place of a score: attended whatever comes; above every sum of 16 scores
NEVER = -(1 << 31)  # padding
LEAST = -(1 << 23)  # below every score
BLOCK = 1024  # keys whose products are in the nearest cache
PAD = 64  # rows of products and ranks have room for so many more
GROUP_CODES = {"relative": 0, "max": 1, "sum": 2}

F32, I16, I32, I64 = (np.empty(0, kind) for kind in (np.float32, np.int16, np.int32, np.int64))
U8, U64, BOOL = (np.empty(0, kind) for kind in (np.uint8, np.uint64, np.bool_))
GAIN_ONE = np.int32(32)


@inlined
def look_up(codes, table, starts, words, count, out, stride):
    """What `dots` does, for `count` keys, by tables of sums (`fill_sums`)."""
    low = np.empty(4, np.int64)
    for head in range(4):
        low[head] = starts[head]  # twice what the tables add so that nothing is negative, and the sum
    sums = table.reshape(words * 8, 256)
    for i in range(count):
        total = np.uint64(0)
        for word in range(words):
            code = np.uint64(codes[i * words + word])
            for part in range(8):
                total += sums[8 * word + part, (code >> np.uint64(8 * part)) & np.uint64(255)]
        for head in range(4):
            lane = np.int64((total >> np.uint64(16 * head)) & np.uint64(0xFFFF))
            out[head * stride + i] = np.int16(2 * lane - low[head])


@inlined
def products(codes, words, count, table, table_size, starts, out, stride):
    """`c = p . u` of `count` keys whose codes lie at an address, for 4 heads: int16 `[4, stride]` at `out`."""
    if LANES == 0:
        entries = at(table, table_size // 2, U64)
        sums = at(starts, 4, I32)
        low = np.empty(4, np.int64)
        for head in range(4):
            offset = 0
            for part in range(8 * words):
                offset += np.int64((entries[256 * part] >> np.uint64(16 * head)) & np.uint64(0xFFFF))
            low[head] = 2 * offset + sums[head]
        look_up(at(codes, count * words, I64), entries, low, words, count, at(out, 4 * stride, I16), stride)
        return
    for i in range(0, count - LANES + 1, LANES):
        if words == 1:
            dots_1(codes + 8 * i, table, starts, out + 2 * i, stride)
        else:
            dots_2(codes + 16 * i, table, starts, out + 2 * i, stride)
    rest = count % LANES
    if rest:
        done = count - rest
        some = np.zeros(LANES * words, np.int64)
        some[: rest * words] = at(codes + 8 * words * done, rest * words, I64)
        if words == 1:
            dots_1(some.ctypes.data, table, starts, out + 2 * done, stride)
        else:
            dots_2(some.ctypes.data, table, starts, out + 2 * done, stride)


@inlined
def largest(product, gains, gained, valid, masked):
    """The best score of one head."""
    best = np.int32(LEAST)
    if gained:
        for i in range(len(product)):
            score = np.int32(np.int32(product[i]) * np.int32(np.int32(gains[i]) + GAIN_ONE))
            if masked and not valid[i]:
                score = np.int32(LEAST)
            best = max(best, score)
    else:
        for i in range(len(product)):
            score = np.int32(product[i])
            if masked and not valid[i]:
                score = np.int32(LEAST)
            best = max(best, score)
    return best


@inlined
def add_head(product, gains, gained, group, best, least, limit, top, total):
    """One head's part in the ranks of some keys: `top` its largest, `total` its sum."""
    for i in range(len(product)):
        score = np.int32(product[i])
        if gained:
            score = np.int32(score * np.int32(np.int32(gains[i]) + GAIN_ONE))
        if group == 0:
            score = min(max(np.int32(score - best), least), np.int32(0))
        top[i] = max(top[i], score)
        total[i] = np.int32(total[i] + (max(score, limit) if group == 0 else score))


@inlined
def multiply(
    task, kv_heads, heads, tokens, words, parts, size, codes, codes_b, codes_h, gain, gain_b, gain_h, valid, valid_b,
    lengths, tables, table_size, totals, kept, best, stride,
):  # fmt: skip
    """The products of a part of a row, and the best score of each head in it."""
    row, part = task // parts, task % parts
    b, h = row // kv_heads, row % kv_heads
    fours = (heads + 3) // 4
    length = at(lengths + 8 * b, 1, I64)[0] if lengths else tokens
    found = at(best + 4 * task * 4 * fours, 4 * fours, I32)
    found[:] = LEAST
    for begin in range(part * size, min(length, part * size + size), BLOCK):
        count = min(BLOCK, length - begin, part * size + size - begin)
        gains = at(gain + b * gain_b + h * gain_h + begin, count if gain else 0, U8)
        real = at(valid + b * valid_b + begin, count if valid else 0, BOOL)
        for four in range(fours):
            out = kept + 2 * ((row * fours + four) * 4 * stride + begin)
            which = row * fours + four
            products(
                codes + 8 * (b * codes_b + h * codes_h + begin * words), words, count,
                tables + 4 * table_size * which, table_size, totals + 16 * which, out, stride,
            )  # fmt: skip
            for head in range(4 * four, min(heads, 4 * four + 4)):
                product = at(out + 2 * (head & 3) * stride, count, I16)
                found[head] = max(found[head], largest(product, gains, gain != 0, real, valid != 0))


@inlined
def rank_part(
    task, kv_heads, heads, tokens, parts, size, group, gain, gain_b, gain_h, valid, valid_b, lengths, scale, scaling,
    kept, best, ranked, stride,
):  # fmt: skip
    """The ranks of a part of a row, once all its products are known."""
    row, part = task // parts, task % parts
    b, h = row // kv_heads, row % kv_heads
    fours = (heads + 3) // 4
    length = at(lengths + 8 * b, 1, I64)[0] if lengths else tokens
    least = np.int32(-(((1 << 31) - 1) // (5 * heads)))
    logit = np.float32(64 if gain else 1) / (at(scale + 4 * row, 1, F32)[0] * np.float32(scaling))
    limit = np.int32(-min(np.float32(16) * logit, np.float32(1 << 24)))
    top, total = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    ranks = at(ranked + 4 * row * stride, stride, I32)
    for begin in range(part * size, min(tokens, part * size + size), BLOCK):
        end = min(tokens, part * size + size, begin + BLOCK)
        count = max(0, min(length, end) - begin)
        gains = at(gain + b * gain_b + h * gain_h + begin, count if gain else 0, U8)
        top[:] = NEVER
        total[:] = 0
        for head in range(heads):
            most = np.int32(LEAST)
            for other in range(parts):
                most = max(most, at(best + 4 * ((row * parts + other) * 4 * fours + head), 1, I32)[0])
            product = at(kept + 2 * ((row * fours * 4 + head) * stride + begin), count, I16)
            add_head(product, gains, gain != 0, group, most, least, limit, top, total)
        for i in range(count):
            if group == 0:
                ranks[begin + i] = np.int32(np.int32(4 * heads) * top[i] + total[i])
            else:
                ranks[begin + i] = top[i] if group == 1 else total[i]
        if valid:
            real = at(valid + b * valid_b + begin, count, BOOL)
            for i in range(count):
                if not real[i]:
                    ranks[begin + i] = NEVER
        ranks[begin + count : end] = NEVER
    if part == parts - 1:
        ranks[tokens:] = NEVER


@compiled(parallel=True)
def score_kernel(
    rows, kv_heads, heads, tokens, words, parts, group, codes, codes_b, codes_h, gain, gain_b, gain_h, valid, valid_b,
    lengths, scale, scaling, tables, table_size, totals, kept, best, ranked, stride,
):  # fmt: skip
    """Ranks int32 `[rows, stride]` of up to `tokens` keys; `kept` int16 `[rows, heads up to 4s, stride]` on the way."""
    size = ((tokens + parts - 1) // parts + PAD - 1) // PAD * PAD
    for index in numba.prange(rows * parts):
        multiply(
            np.int64(index), kv_heads, heads, tokens, words, parts, size, codes, codes_b, codes_h, gain, gain_b, gain_h,
            valid, valid_b, lengths, tables, table_size, totals, kept, best, stride,
        )  # fmt: skip
    for index in numba.prange(rows * parts):
        rank_part(
            np.int64(index), kv_heads, heads, tokens, parts, size, group, gain, gain_b, gain_h, valid, valid_b, lengths,
            scale, scaling, kept, best, ranked, stride,
        )  # fmt: skip
