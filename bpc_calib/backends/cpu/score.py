"""Step 2: one ranked integer per key and KV head, from the codes alone.

Ranking a key takes each head's best score (`group_scores`), so a first pass leaves the products, as int16, and the best
scores, and a second pass ranks; each thread has its own share of the keys.
"""

import numpy as np

from bpc_calib.backends.cpu.compiling import inlined
from bpc_calib.backends.cpu.constants import GAIN_OFFSET, GAIN_UNIT, LARGEST_LIMIT, RELATIVE_LIMIT
from bpc_calib.backends.cpu.dots import AT_ONCE, LANES, dots_1, dots_2
from bpc_calib.backends.cpu.language import at, prefetch

__all__ = [
    "BLOCK",
    "GROUP_CODES",
    "PAD",
    "SAMPLE",
    "bests",
    "length_of",
    "limit_of",
    "rank",
    "sample_size",
    "sample_step",
    "score_part",
]

LEAST = -(1 << 23)  # below every score
BLOCK = 1024  # keys whose products are in the nearest cache
AHEAD = 4096  # bytes of codes between what is read and what is prefetched
SAMPLE = 1024  # keys of each row that are ranked first
PAD = 64  # tokens of room behind each row of products
GROUP_CODES = {"relative": 0, "max": 1, "sum": 2}

F32, I16, I32, I64 = (np.empty(0, kind) for kind in (np.float32, np.int16, np.int32, np.int64))
U8, U64, BOOL = (np.empty(0, kind) for kind in (np.uint8, np.uint64, np.bool_))


@inlined
def sample_size(fours):
    """Bytes of the sample of a row."""
    return SAMPLE * (8 * fours + 1)


@inlined
def look_up(codes, table, starts, words, count, out, stride):
    """`dots` for `count` keys, by tables of sums (`fill_sums`)."""
    low = np.empty(4, np.int64)
    for head in range(4):
        low[head] = starts[head]  # twice what the tables add to stay above 0, and the sum of the query
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
    for i in range(0, count - AT_ONCE + 1, AT_ONCE):
        # The processor's own prefetching stops at the end of a page.
        soon = codes + 8 * words * i + AHEAD
        for byte in range(0, 8 * words * AT_ONCE, 64):
            prefetch(soon + byte)
        if words == 1:
            dots_1(codes + 8 * i, table, starts, out + 2 * i, stride)
        else:
            dots_2(codes + 16 * i, table, starts, out + 2 * i, stride)
    rest = count % AT_ONCE
    if rest:
        done = count - rest
        padded = np.zeros(AT_ONCE * words, np.int64)
        padded[: rest * words] = at(codes + 8 * words * done, rest * words, I64)
        if words == 1:
            dots_1(padded.ctypes.data, table, starts, out + 2 * done, stride)
        else:
            dots_2(padded.ctypes.data, table, starts, out + 2 * done, stride)
        padded[0] = 0  # a use after the call, or numba frees the array before it


@inlined
def largest(products, stride, gains, gained, valid, masked, count, best):
    """Raise the best score of each of 4 heads, `best [4]`, to those of `count` keys."""
    a, b = at(products, count, I16), at(products + 2 * stride, count, I16)
    c, d = at(products + 4 * stride, count, I16), at(products + 6 * stride, count, I16)
    best_a, best_b, best_c, best_d = best[0], best[1], best[2], best[3]
    for i in range(count):
        one, two, three, four = np.int32(a[i]), np.int32(b[i]), np.int32(c[i]), np.int32(d[i])
        if gained:
            weight = np.int32(np.int32(gains[i]) + GAIN_OFFSET)
            one, two = np.int32(one * weight), np.int32(two * weight)
            three, four = np.int32(three * weight), np.int32(four * weight)
        if masked and not valid[i]:
            one = two = three = four = np.int32(LEAST)
        best_a, best_b, best_c, best_d = max(best_a, one), max(best_b, two), max(best_c, three), max(best_d, four)
    best[0], best[1], best[2], best[3] = best_a, best_b, best_c, best_d


def _ranker(name: str, group: int, gained: bool, whole: bool = False):
    """A function that ranks keys by the scores of 4 heads, one per case: numba leaves a branch inside the loop.

    With `whole` there are no other heads, and `total` becomes the relative rank itself.
    """

    def rank_four(a, b, c, d, gains, best, masks, limit, first, top, total):
        """`top` becomes the largest of the 4 scores, `total` their sum; both include earlier heads unless `first`.

        A missing head has the products of another one, and mask 0. Keys that are not valid may get anything.
        """
        best_a, best_b, best_c, best_d = best[0], best[1], best[2], best[3]
        mask_b, mask_c, mask_d = masks[1], masks[2], masks[3]
        for i in range(len(top)):
            one, two, three, four = np.int32(a[i]), np.int32(b[i]), np.int32(c[i]), np.int32(d[i])
            if gained:
                weight = np.int32(np.int32(gains[i]) + GAIN_OFFSET)
                one, two = np.int32(one * weight), np.int32(two * weight)
                three, four = np.int32(three * weight), np.int32(four * weight)
            if group == 0:
                one, two = np.int32(one - best_a), np.int32(two - best_b)
                three, four = np.int32(three - best_c), np.int32(four - best_d)
            if group != 2:
                most = max(max(one, two), max(three, four))
                if not whole:
                    top[i] = most if first else max(most, top[i])
            if group == 0:
                one, two, three, four = max(one, limit), max(two, limit), max(three, limit), max(four, limit)
            if whole:
                total[i] = np.int32(np.int32(16) * most) + np.int32(np.int32(one + two) + np.int32(three + four))
            elif group != 1:
                three, four = np.int32(three & mask_c), np.int32(four & mask_d)
                both = np.int32(np.int32(one + np.int32(two & mask_b)) + np.int32(three + four))
                total[i] = both if first else np.int32(both + total[i])

    # Kernels that several processes kept share functions of the same name, so each name is given once.
    rank_four.__name__ = rank_four.__qualname__ = name
    return inlined(rank_four)


relative, relative_gain = _ranker("relative", 0, False), _ranker("relative_gain", 0, True)
whole_plain, whole_gain = _ranker("whole_plain", 0, False, True), _ranker("whole_gain", 0, True, True)
largest_plain, largest_gain = _ranker("largest_plain", 1, False), _ranker("largest_gain", 1, True)
sum_plain, sum_gain = _ranker("sum_plain", 2, False), _ranker("sum_gain", 2, True)


@inlined
def bests(row, step):
    """The best score of each head over all parts, and masks, see `rank_four`."""
    heads, parts = step.heads, step.parts
    fours = (heads + 3) // 4
    most, masks = np.full(4 * fours, np.int32(LEAST)), np.zeros(4 * fours, np.int32)
    masks[:heads] = -1
    for head in range(4 * fours):
        stands_for = head if head < heads else heads - 1
        for part in range(row * parts, (row + 1) * parts):
            most[head] = max(most[head], at(step.best + 4 * (part * 4 * fours + stands_for), 1, I32)[0])
    return most, masks


@inlined
def rank(address, stride, gains, gained, group, heads, most, masks, limit, top, total, ranks):
    """The ranks of `len(ranks)` keys whose products are int16 `[heads, stride]` at an address.

    The relative score is that of `group_scores` without its clamp to int32, which 16 heads never reach.
    """
    count = len(ranks)
    top, total = top[:count], total[:count]
    for four in range((heads + 3) // 4):
        begin, last = address + 8 * four * stride, min(heads - 4 * four, 4) - 1
        a = at(begin, count, I16)
        b = at(begin + 2 * stride * min(1, last), count, I16)
        c = at(begin + 2 * stride * min(2, last), count, I16)
        d = at(begin + 2 * stride * last, count, I16)
        best, mask, first = most[4 * four : 4 * four + 4], masks[4 * four : 4 * four + 4], four == 0
        if group == 0 and heads == 4:
            if gained:
                whole_gain(a, b, c, d, gains, best, mask, limit, first, top, ranks)
            else:
                whole_plain(a, b, c, d, gains, best, mask, limit, first, top, ranks)
            return
        if group == 0 and gained:
            relative_gain(a, b, c, d, gains, best, mask, limit, first, top, total)
        elif group == 0:
            relative(a, b, c, d, gains, best, mask, limit, first, top, total)
        elif group == 1 and gained:
            largest_gain(a, b, c, d, gains, best, mask, limit, first, top, total)
        elif group == 1:
            largest_plain(a, b, c, d, gains, best, mask, limit, first, top, total)
        elif gained:
            sum_gain(a, b, c, d, gains, best, mask, limit, first, top, total)
        else:
            sum_plain(a, b, c, d, gains, best, mask, limit, first, top, total)
    if group == 0:
        for i in range(count):
            ranks[i] = np.int32(np.int32(4 * heads) * top[i] + total[i])
    else:
        ranks[:] = top if group == 1 else total


@inlined
def limit_of(row, step):
    """How far below the best a score counts, in units of scores."""
    logit = np.float32(GAIN_UNIT if step.gain else 1) / (at(step.scale + 4 * row, 1, F32)[0] * np.float32(step.scaling))
    return np.int32(-min(RELATIVE_LIMIT * logit, LARGEST_LIMIT))


@inlined
def sample_step(length):
    """How many keys there are per key of the sample."""
    return max(16, (length + SAMPLE - 1) // SAMPLE)


@inlined
def sample(begin, count, length, heads, products, stride, gains, gained, sampled, weights):
    """Copy the sampled keys of a block: products to `sampled [heads, SAMPLE]`, gains to `weights`."""
    step = sample_step(length)
    for i in range((begin + step - 1) // step, (begin + count + step - 1) // step):
        place = i * step - begin
        for head in range(heads):
            sampled[head * SAMPLE + i] = at(products + 2 * (head * stride + place), 1, I16)[0]
        if gained:
            weights[i] = gains[place]


@inlined
def length_of(b, step):
    """Tokens in use of a sequence."""
    return min(step.tokens, at(step.lengths + 8 * b, 1, I64)[0]) if step.lengths else step.tokens


@inlined
def score_part(task, slot, step):
    """The products of a part of a row, and the best score of each head in it.

    The sample of a slot is int16 products `[H, SAMPLE]` and uint8 gains `[SAMPLE]`.
    """
    row, part = task // step.parts, task % step.parts
    b, h = row // step.kv_heads, row % step.kv_heads
    fours, words, stride = (step.heads + 3) // 4, step.words, step.stride
    length, last = length_of(b, step), (part + 1) * step.part_size
    best = at(step.best + 4 * task * 4 * fours, 4 * fours, I32)
    best[:] = LEAST
    sampled = at(step.sample + slot * sample_size(fours), 4 * fours * SAMPLE, I16)
    weights = at(step.sample + slot * sample_size(fours) + 8 * fours * SAMPLE, SAMPLE, U8)
    codes = step.codes + 8 * (b * step.codes_b + h * step.codes_h + slot * step.codes_slot)
    gain = step.gain + b * step.gain_b + h * step.gain_h + slot * step.gain_slot
    for begin in range(part * step.part_size, min(length, last), BLOCK):
        count = min(BLOCK, length - begin, last - begin)
        gains = at(gain + begin, count if step.gain else 0, U8)
        valid = at(step.valid + b * step.valid_b + begin, count if step.valid else 0, BOOL)
        for four in range(fours):
            out = step.products + 2 * ((slot * fours + four) * 4 * stride + begin)
            which = row * fours + four
            table, totals = step.tables + 4 * step.table_size * which, step.totals + 16 * which
            products(codes + 8 * begin * words, words, count, table, step.table_size, totals, out, stride)
            best_of = best[4 * four : 4 * four + 4]
            if step.gain:
                largest(out, stride, gains, True, valid, step.valid != 0, count, best_of)
            else:
                largest(out, stride, gains, False, valid, step.valid != 0, count, best_of)
        sample(
            begin, count, length, step.heads, step.products + 2 * (slot * fours * 4 * stride + begin), stride, gains,
            step.gain != 0, sampled, weights,
        )  # fmt: skip
