"""Step 3: the forced tokens and the best ranked, exactly `k`, ascending.

The ranks of a sample of the keys give a bound that the best keys most probably reach. Then all keys are ranked, a block
at a time; those that reach the bound are the candidates, and the best are found among them digit by digit. Where too
few reach it, all keys are candidates.
"""

import numpy as np

from bpc_calib.backends.cpu.compiling import inlined
from bpc_calib.backends.cpu.language import at, at_least, lowest, ones
from bpc_calib.backends.cpu.score import BLOCK, SAMPLE, bests, length_of, limit_of, rank, sample_size, sample_step

__all__ = ["candidates_of_part", "mark_row", "take_row"]

FORCED = 1 << 28  # instead of a rank: attended in any case; above every sum of 16 scores
NEVER = -(1 << 31)  # instead of a rank: padding
DIGIT = 11  # bits
AT_ONCE = 8  # candidates that are written without a branch
FEW = 1024  # at most so many values are copied, to go on with them alone
I32, I64 = (np.empty(0, kind) for kind in (np.int32, np.int64))
U8, U64, BOOL = (np.empty(0, kind) for kind in (np.uint8, np.uint64, np.bool_))
ONE, WORD = np.uint64(1), np.uint64(63)


@inlined
def kth(values, count, k, exact):
    """The `k`-th largest of the first `count` int32, and how many like it are among the `k`.

    If not `exact`, a value a little smaller, and how many of the `k` share its digits so far.
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
            kept = 0
            for i in range(count):
                if (np.int64(most) - np.int64(values[i])) >> shift == prefix:
                    near[kept] = values[i]
                    kept += 1
            values, count = near, kept
        width = min(DIGIT, shift)
        shift -= width


@inlined
def is_marked(marks, place):
    return (marks[place >> 6] >> (np.uint64(place) & WORD)) & ONE != 0


@inlined
def mark(marks, place):
    marks[place >> 6] |= ONE << (np.uint64(place) & WORD)


@inlined
def force(marks, valid, masked, length, k, recent, sink, worst, places):
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
                break  # the newest tokens begin here
            mark(marks, place)
            first += 1
        place += 1
    marked = first
    for i in range(len(worst)):
        if marked >= k or places == 0:
            break
        place = worst[i]
        if 0 <= place < length and (not masked or valid[place]) and not is_marked(marks, place):
            mark(marks, place)
            marked += 1
            places -= 1


@inlined
def least_of_sample(wanted, length, heads, group, sampled, gained, valid, masked, most, masks, limit):
    """A rank that more than `wanted` keys most probably reach, from a sample of all."""
    step = sample_step(length)
    count = (length + step - 1) // step
    expected = wanted * count / max(1, length)
    enough = np.int64(expected + 4 * np.sqrt(expected) + 8)
    weights, ranks = at(sampled + 8 * ((heads + 3) // 4) * SAMPLE, SAMPLE, U8), np.empty(count, np.int32)
    top, total = np.empty(count, np.int32), np.empty(count, np.int32)
    rank(sampled, np.int64(SAMPLE), weights, gained, group, heads, most, masks, limit, top, total, ranks)
    if masked:
        real = 0
        for i in range(count):
            ranks[real] = ranks[i]
            real += np.int64(valid[i * step])
        count = real  # without padding
    return kth(ranks, count, enough, False)[0] if enough < count else np.int32(NEVER + 1)


@inlined
def wanted_of(row, step):
    """How many tokens to choose for a row."""
    place = row // step.kv_heads * step.ks_b + row % step.kv_heads * step.ks_h
    return min(step.width, at(step.ks + 8 * place, 1, I64)[0] if step.ks else step.k)


@inlined
def mark_row(row, slot, step):
    """Mark the forced tokens of a row, and find the rank from which on a key is a candidate."""
    b = row // step.kv_heads
    length, wanted, masked = length_of(b, step), wanted_of(row, step), step.valid != 0
    valid = at(step.valid + b * step.valid_b, step.tokens if masked else 0, BOOL)
    marks = at(step.marks + slot * step.stride // 8, step.stride // 64, U64)
    marks[:] = 0
    force(
        marks, valid, masked, length, wanted, step.recent, step.sink,
        at(step.worst + 4 * row * step.worst_count, step.worst_count, I32),
        wanted * step.numerator // step.denominator,
    )  # fmt: skip
    most, masks = bests(row, step)
    at(step.least + 4 * row, 1, I32)[0] = least_of_sample(
        wanted, length, step.heads, step.group, step.sample + slot * sample_size((step.heads + 3) // 4), step.gain != 0,
        valid, masked, most, masks, limit_of(row, step),
    )  # fmt: skip


@inlined
def candidates_of_part(task, slot, step):
    """Places and ranks, in order, of the keys of a part that reach the rank of `mark_row` or that are forced.

    They lie where the part begins among the candidates of its slot.
    """
    row, part = task // step.parts, task % step.parts
    b, h = row // step.kv_heads, row % step.kv_heads
    stride, size, group, masked = step.stride, step.part_size, step.group, step.valid != 0
    length, last = length_of(b, step), (part + 1) * size
    limit, least = limit_of(row, step), at(step.least + 4 * row, 1, I32)[0]
    most, masks = bests(row, step)
    top, total, ranks = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32), np.empty(BLOCK + 64, np.int32)
    marks = at(step.marks + slot * stride // 8, stride // 64, U64)
    places = at(step.candidates + 8 * slot * stride + 4 * part * size, size, I32)
    values = at(step.candidates + 8 * slot * stride + 4 * (stride + part * size), size, I32)
    products = step.products + 2 * slot * ((step.heads + 3) // 4) * 4 * stride
    gain = step.gain + b * step.gain_b + h * step.gain_h + slot * step.gain_slot
    taken = 0
    for begin in range(part * size, min(length, last), BLOCK):
        count = min(BLOCK, length - begin, last - begin)
        rank(
            products + 2 * begin, stride, at(gain + begin, count if step.gain else 0, U8), step.gain != 0, group,
            step.heads, most, masks, limit, top, total, ranks[:count],
        )  # fmt: skip
        if masked:
            valid = at(step.valid + b * step.valid_b + begin, count, BOOL)
            for i in range(count):
                if not valid[i]:
                    ranks[i] = NEVER
        ranks[count : count + 64] = NEVER
        for first in range(0, count, 64):
            forced = marks[(begin + first) >> 6]
            bits = at_least(ranks.ctypes.data + 4 * first, least) | forced
            many = ones(bits)
            if many <= AT_ONCE:
                # No processor predicts how many there are, so 8 are written without a branch; the next overwrite what
                # is too much.
                for i in range(AT_ONCE):
                    place, to = np.uint64(first) + lowest(bits), np.uint64(taken) + np.uint64(i)  # no index below 0
                    places[to], values[to] = np.uint64(begin) + place, ranks[place]
                    bits &= bits - ONE
            else:
                for i in range(many):
                    place, to = np.uint64(first) + lowest(bits), np.uint64(taken) + np.uint64(i)
                    places[to], values[to] = np.uint64(begin) + place, ranks[place]
                    bits &= bits - ONE
            if forced:
                for i in range(taken, taken + many):
                    if is_marked(marks, np.int64(places[i])):
                        values[i] = FORCED
            taken += many
    at(step.counts + 8 * task, 1, I64)[0] = taken


@inlined
def take_row(row, slot, step):
    """The places of the best, ascending, int64 `[rows, width]`, -1 behind the last."""
    wanted, parts, stride = wanted_of(row, step), step.parts, step.stride
    counts = at(step.counts + 8 * row * parts, parts, I64)
    least = at(step.least + 4 * row, 1, I32)
    if counts.sum() < wanted and least[0] > NEVER + 1:
        least[0] = NEVER + 1
        for task in range(row * parts, (row + 1) * parts):
            candidates_of_part(task, slot, step)
    room = at(step.candidates + 8 * slot * stride, 2 * stride, I32)
    places, values = room[:stride], room[stride:]
    count = counts[0]
    for part in range(1, parts):
        for i in range(part * step.part_size, part * step.part_size + counts[part]):
            places[count], values[count] = places[i], values[i]
            count += 1
    wanted = min(wanted, count)
    out = at(step.indices + 8 * row * step.width, step.width, I64)
    taken = 0
    if wanted:
        threshold, equal = kth(values, count, wanted, True)
        for i in range(count):
            if taken == wanted:
                break
            tie = np.int64(values[i] == threshold) & np.int64(equal > 0)
            out[taken] = places[i]
            taken += np.int64(values[i] > threshold) | tie
            equal -= tie
    out[taken:] = -1
