"""Step 3: the forced tokens and the best ranked, exactly `k`, ascending.

The ranks of a sample of the keys say from where on a key may be among the best, with room to spare. Then all are
ranked, a block at a time, and the few that are above are kept, and counted by their digits. Where the sample was
wrong, everything is.
"""

import numpy as np

from bpc_calib.backends.cpu.language import above, at, inlined, lowest, ones
from bpc_calib.backends.cpu.score import BLOCK, SAMPLE, bests, limit_of, rank, sample_size, sample_step

__all__ = ["candidates_of_part", "mark_row", "take_row"]

FORCED = 1 << 28  # in place of a rank: attended whatever comes; above every sum of 16 scores
NEVER = -(1 << 31)  # padding
DIGIT = 11  # bits
AT_ONCE = 8
FEW = 1024  # values that are worth a copy
I32, I64 = (np.empty(0, kind) for kind in (np.int32, np.int64))
U8, U64, BOOL = (np.empty(0, kind) for kind in (np.uint8, np.uint64, np.bool_))
ONE, WORD = np.uint64(1), np.uint64(63)


@inlined
def kth(values, count, k, exact):
    """The `k`-th largest of the first `count` int32, and how many like it are among the `k`.

    If not `exact`, something a little smaller, and how many from there to the next a little larger are among them.
    """
    bins, near = np.empty(1 << DIGIT, np.int32), np.empty(FEW, np.int32)
    most, least = values[0], values[0]
    for i in range(count):
        most, least = max(most, values[i]), min(least, values[i])
    span, shift = np.int64(most) - np.int64(least), 0
    while span >> (shift + DIGIT):
        shift += 1
    prefix, left, width = np.int64(0), k, DIGIT
    while True:
        bins[:] = 0
        for i in range(count):
            below = np.int64(most) - np.int64(values[i])
            if below >> (shift + width) == prefix:
                bins[(below >> shift) & ((1 << width) - 1)] += 1
        digit = 0
        while bins[digit] < left:
            left -= bins[digit]
            digit += 1
        prefix = (prefix << width) | digit
        if shift == 0 or not exact:
            return np.int32(np.int64(most) - (((prefix + 1) << shift) - 1)), left
        if bins[digit] <= FEW and count > FEW:
            some = 0
            for i in range(count):
                if (np.int64(most) - np.int64(values[i])) >> shift == prefix:
                    near[some] = values[i]
                    some += 1
            values, count = near, some
        width = min(DIGIT, shift)
        shift -= width


@inlined
def is_marked(marks, place):
    return (marks[place >> 6] >> (np.uint64(place) & WORD)) & ONE != 0


@inlined
def mark(marks, place):
    marks[place >> 6] |= ONE << (np.uint64(place) & WORD)


@inlined
def force(marks, valid, masked, length, k, recent, sink, worst, listed, places):
    """Mark the tokens that are attended whatever their rank: the newest, the first, those coded worst."""
    marked = 0
    place = length - 1
    while marked < min(k, recent) and place >= 0:
        if not masked or valid[place]:
            mark(marks, place)
            marked += 1
        place -= 1
    stop, place, first = marked + sink, 0, marked
    while first < min(k, stop) and place < length:
        if not masked or valid[place]:
            if is_marked(marks, place):
                break  # from here on the newest
            mark(marks, place)
            first += 1
        place += 1
    marked = first
    for i in range(listed):
        if marked >= k or places == 0:
            break
        place = worst[i]
        if 0 <= place < length and (not masked or valid[place]) and not is_marked(marks, place):
            mark(marks, place)
            marked += 1
            places -= 1


@inlined
def least_of_sample(wanted, length, heads, group, sampled, gained, valid, masked, most, masks, limit):
    """A rank that more than `wanted` keys most probably reach, by a sample of all."""
    step = sample_step(length)
    count = (length + step - 1) // step
    share = wanted * count / max(1, length)
    enough = np.int64(share + 4 * np.sqrt(share) + 8)
    weights, ranks = at(sampled + 8 * ((heads + 3) // 4) * SAMPLE, SAMPLE, U8), np.empty(count, np.int32)
    top, total = np.empty(count, np.int32), np.empty(count, np.int32)
    rank(sampled, SAMPLE, weights, gained, group, heads, most, masks, limit, top, total, ranks)
    if masked:
        real = 0
        for i in range(count):
            ranks[real] = ranks[i]
            real += np.int64(valid[i * step])
        count = real  # padding has no part in it
    return kth(ranks, count, enough, False)[0] if enough < count else np.int32(NEVER + 1)


@inlined
def wanted_of(b, h, k, ks, ks_b, ks_h, width):
    return min(width, at(ks + 8 * (b * ks_b + h * ks_h), 1, I64)[0] if ks else k)


@inlined
def mark_row(
    row, kv_heads, heads, tokens, parts, group, gain, valid, valid_b, lengths, scale, scaling, best, stride, sampled, k,
    ks, ks_b, ks_h, recent, sink, worst, listed, numerator, denominator, width, marks, least, slot,
):  # fmt: skip
    """Which tokens are forced, `marks` uint64 `[slots, stride / 64]`, and from which rank on a key is a candidate."""
    b, h = row // kv_heads, row % kv_heads
    length = min(tokens, at(lengths + 8 * b, 1, I64)[0]) if lengths else tokens
    wanted = wanted_of(b, h, k, ks, ks_b, ks_h, width)
    real = at(valid + b * valid_b, tokens if valid else 0, BOOL)
    forced = at(marks + slot * stride // 8, stride // 64, U64)
    forced[:] = 0
    force(
        forced, real, valid != 0, length, wanted, recent, sink, at(worst + 4 * row * listed, listed, I32), listed,
        wanted * numerator // denominator,
    )  # fmt: skip
    most, masks = bests(row, heads, parts, best)
    at(least + 4 * row, 1, I32)[0] = least_of_sample(
        wanted, length, heads, group, sampled + slot * sample_size((heads + 3) // 4), gain != 0, real, valid != 0, most,
        masks, limit_of(row, scale, gain != 0, scaling),
    )  # fmt: skip


@inlined
def candidates_of_part(
    task, kv_heads, heads, tokens, parts, size, group, gain, gain_b, gain_h, valid, valid_b, lengths, scale, scaling,
    kept, best, stride, marks, least, spare, counts, slot,
):  # fmt: skip
    """Places and ranks, in order, of the keys of a part whose rank is at least `least` or that are forced.

    `spare` int32 `[slots, 2, stride]`, from where the part begins on; how many, in `counts` int64 `[rows, parts]`.
    """
    row, part = task // parts, task % parts
    b, h = row // kv_heads, row % kv_heads
    fours = (heads + 3) // 4
    length = min(tokens, at(lengths + 8 * b, 1, I64)[0]) if lengths else tokens
    limit, lowest_rank = limit_of(row, scale, gain != 0, scaling), at(least + 4 * row, 1, I32)[0]
    most, masks = bests(row, heads, parts, best)
    top, total, ranks = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32), np.empty(BLOCK + 64, np.int32)
    forced = at(marks + slot * stride // 8, stride // 64, U64)
    found = at(spare + 8 * slot * stride + 4 * part * size, size, I32)
    values = at(spare + 8 * slot * stride + 4 * (stride + part * size), size, I32)
    taken = 0
    for begin in range(part * size, min(length, part * size + size), BLOCK):
        count = min(BLOCK, length - begin, part * size + size - begin)
        rank(
            kept + 2 * (slot * fours * 4 * stride + begin), stride,
            at(gain + b * gain_b + h * gain_h + begin, count if gain else 0, U8), gain != 0, group, heads, most, masks,
            limit, top, total, ranks[:count],
        )  # fmt: skip
        if valid:
            real = at(valid + b * valid_b + begin, count, BOOL)
            for i in range(count):
                if not real[i]:
                    ranks[i] = NEVER
        ranks[count : count + 64] = NEVER
        for first in range(0, count, 64):
            always = forced[(begin + first) >> 6]
            bits = above(ranks.ctypes.data + 4 * first, lowest_rank) | always
            many = ones(bits)
            if many <= AT_ONCE:
                # How many there are cannot be foretold: so many without a branch. Those too many are overwritten.
                for i in range(AT_ONCE):
                    place, to = np.uint64(first) + lowest(bits), np.uint64(taken) + np.uint64(i)  # no index below 0
                    found[to], values[to] = np.uint64(begin) + place, ranks[place]
                    bits &= bits - ONE
            else:
                for i in range(many):
                    place, to = np.uint64(first) + lowest(bits), np.uint64(taken) + np.uint64(i)
                    found[to], values[to] = np.uint64(begin) + place, ranks[place]
                    bits &= bits - ONE
            if always:
                for i in range(taken, taken + many):
                    if is_marked(forced, np.int64(found[i])):
                        values[i] = FORCED
            taken += many
    at(counts + 8 * task, 1, I64)[0] = taken


@inlined
def take_row(
    row, kv_heads, heads, tokens, parts, size, group, gain, gain_b, gain_h, valid, valid_b, lengths, scale, scaling,
    kept, best, stride, k, ks, ks_b, ks_h, marks, least, spare, counts, indices, width, slot,
):  # fmt: skip
    """The places of the best, ascending, int64 `[rows, width]`, -1 behind the last."""
    wanted = wanted_of(row // kv_heads, row % kv_heads, k, ks, ks_b, ks_h, width)
    many = at(counts + 8 * row * parts, parts, I64)
    floor = at(least + 4 * row, 1, I32)
    if many.sum() < wanted and floor[0] > NEVER + 1:
        floor[0] = NEVER + 1
        for task in range(row * parts, (row + 1) * parts):
            candidates_of_part(
                task, kv_heads, heads, tokens, parts, size, group, gain, gain_b, gain_h, valid, valid_b, lengths,
                scale, scaling, kept, best, stride, marks, least, spare, counts, slot,
            )  # fmt: skip
    room = at(spare + 8 * slot * stride, 2 * stride, I32)
    found, values = room[:stride], room[stride:]
    count = many[0]
    for part in range(1, parts):
        for i in range(part * size, part * size + many[part]):
            found[count], values[count] = found[i], values[i]
            count += 1
    wanted = min(wanted, count)
    out = at(indices + 8 * row * width, width, I64)
    taken = 0
    if wanted:
        threshold, equal = kth(values, count, wanted, True)
        for i in range(count):
            if taken == wanted:
                break
            tie = np.int64(values[i] == threshold) & np.int64(equal > 0)
            out[taken] = found[i]
            taken += np.int64(values[i] > threshold) | tie
            equal -= tie
    out[taken:] = -1
