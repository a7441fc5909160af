"""Step 3: the forced tokens and the best ranked, exactly `k`, ascending.

A sample of the ranks says from where on they may be among the best, with room to spare; the few that are above are
counted by their digits. Where the sample was wrong, everything is.
"""

import numpy as np

from bpc_calib.cpu.language import above, at, inlined, lowest
from bpc_calib.cpu.score import FORCED, NEVER

__all__ = ["take_row"]

SAMPLE = 2048
DIGIT = 11  # bits
I32, I64, BOOL = (np.empty(0, kind) for kind in (np.int32, np.int64, np.bool_))


@inlined
def kth(values, count, k, bins):
    """The `k`-th largest of the first `count` int32, and how many like it are among the `k`."""
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
        if shift == 0:
            return np.int32(np.int64(most) - prefix), left
        width = min(DIGIT, shift)
        shift -= width


@inlined
def force(ranks, valid, masked, length, k, recent, sink, worst, listed, places):
    """Mark the tokens that are attended whatever their rank: the newest, the first, those coded worst."""
    marked = 0
    place = length - 1
    while marked < min(k, recent) and place >= 0:
        if not masked or valid[place]:
            ranks[place] = FORCED
            marked += 1
        place -= 1
    stop, place, first = marked + sink, 0, marked
    while first < min(k, stop) and place < length:
        if not masked or valid[place]:
            if ranks[place] == FORCED:
                break  # from here on the newest
            ranks[place] = FORCED
            first += 1
        place += 1
    marked = first
    for i in range(listed):
        if marked >= k or places == 0:
            break
        place = worst[i]
        if 0 <= place < length and (not masked or valid[place]) and ranks[place] != FORCED:
            ranks[place] = FORCED
            marked += 1
            places -= 1


@inlined
def candidates(ranks, address, length, least, found, values):
    """Places and ranks, in order, of what is at least `least`; how many."""
    count = 0
    for begin in range(0, length, 64):
        bits = above(address + 4 * begin, least)
        while bits:
            place = begin + lowest(bits)
            found[count] = place
            values[count] = ranks[place]
            count += 1
            bits &= bits - np.uint64(1)
    return count


@inlined
def best(ranks, address, length, wanted, found, values, out):
    """The places of the `wanted` best, ascending, -1 behind the last."""
    bins = np.empty(1 << DIGIT, np.int32)
    least = np.int32(NEVER + 1)
    share = wanted * SAMPLE / max(1, length)
    most = np.int64(share + 4 * np.sqrt(share) + 8)
    if length >= 2 * SAMPLE and most < SAMPLE:
        sample = np.empty(SAMPLE, np.int32)
        for i in range(SAMPLE):
            sample[i] = ranks[i * length // SAMPLE]
        least = max(least, kth(sample, SAMPLE, most, bins)[0])
    count = candidates(ranks, address, length, least, found, values)
    if count < wanted and least > NEVER + 1:
        count = candidates(ranks, address, length, np.int32(NEVER + 1), found, values)
    wanted = min(wanted, count)
    taken = 0
    if wanted:
        threshold, equal = kth(values, count, wanted, bins)
        for i in range(count):
            if taken == wanted:
                break
            out[taken] = found[i]
            if values[i] > threshold:
                taken += 1
            elif values[i] == threshold and equal:
                taken += 1
                equal -= 1
    out[taken:] = -1


@inlined
def take_row(
    row, ranked, stride, kv_heads, tokens, lengths, valid, valid_b, k, ks, ks_b, ks_h, recent, sink, worst, listed,
    numerator, denominator, indices, width, spare, slot,
):  # fmt: skip
    """int64 `[rows, width]`, -1 behind the last; `worst` int32 `[rows, listed]`; `spare` int32 `[slots, 2, stride]`."""
    b, h = row // kv_heads, row % kv_heads
    length = min(tokens, at(lengths + 8 * b, 1, I64)[0]) if lengths else tokens
    wanted = min(width, at(ks + 8 * (b * ks_b + h * ks_h), 1, I64)[0] if ks else k)
    address = ranked + 4 * slot * stride
    ranks = at(address, stride, I32)
    real = at(valid + b * valid_b, tokens if valid else 0, BOOL)
    some = at(worst + 4 * row * listed, listed, I32)
    force(ranks, real, valid != 0, length, wanted, recent, sink, some, listed, wanted * numerator // denominator)
    room = at(spare + 8 * slot * stride, 2 * stride, I32)
    best(ranks, address, length, wanted, room[:stride], room[stride:], at(indices + 8 * row * width, width, I64))
