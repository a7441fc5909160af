"""Step 4: finds the least score of the chosen keys, digit by digit: its upper 8 bits, the middle ones, the lowest 8.

Step 2 counts the upper digit. Each later histogram counts only the few keys in the bin found before it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.language import COARSE, FINE, FINE_BITS, NEVER
from bpc_calib.backends.triton.plan import (
    PLAN_LEAST,
    PLAN_LEFT,
    PLAN_LENGTH,
    PLAN_LOW,
    PLAN_SHIFT,
    PLAN_UPPER,
    PLAN_UPPER_LEFT,
    PLAN_WANTED,
    planned,
    record,
    span_of_program,
    whole,
)

__all__ = ["CompactShape", "NarrowShape", "compact_kernel", "find", "fine_kernel", "middle_kernel", "scores_of"]

AT_ONCE = tl.constexpr(4096)  # bins that `find` keeps in registers


class NarrowShape(NamedTuple):
    """Constants of a compiled kernel. `counts [rows, COUNTS]` holds the first, middle and last histogram."""

    MIDDLE: int  # bins of the middle histogram; 1: the upper and the lowest bits are all there are
    COUNTS: int
    BLOCK: int


@triton.jit
def find(histogram, wanted, BINS: tl.constexpr):
    """The highest bin that, with those above it, holds at least `wanted` keys, and how many keys of it are needed.

    If no other bin does, it is bin 0, whatever its count.
    """
    PART: tl.constexpr = BINS if BINS < AT_ONCE else AT_ONCE
    above = 0
    reaching = 0
    short = 0  # keys in the bins above the one searched for
    for part in tl.static_range(0, BINS, PART):  # from the top
        bin = BINS - PART - part + tl.arange(0, PART)
        counts = tl.load(histogram + bin)
        total = tl.sum(counts, 0)
        from_here = above + total - tl.cumsum(counts, 0) + counts
        reaches = (from_here >= wanted) | (bin == 0)
        reaching += tl.sum(reaches.to(tl.int32), 0)
        short = tl.maximum(short, tl.max(tl.where(reaches, 0, from_here), 0))
        above += total
    return reaching - 1, wanted - short


@triton.jit
def scores_of(ranked, row, first, last, room, BLOCK: tl.constexpr):
    """The scores of the tokens from `first` on, `NEVER` from `last` on.

    No threshold is as high as `FORCED` or as low as `NEVER`, so comparisons treat both as they should.
    """
    at = first + tl.arange(0, BLOCK)
    return tl.load(ranked + row.to(tl.int64) * room + at, mask=at < whole(last), other=NEVER)


@triton.jit
def middle_kernel(ranked, plan, counts, room, shape: tl.constexpr):
    """Finds the bin of the first histogram, and counts the next bits in it: grid (programs, rows)."""
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    own = counts + row.to(tl.int64) * shape.COUNTS
    length = planned(plan, row, PLAN_LENGTH)
    low = planned(plan, row, PLAN_LOW)
    shift = planned(plan, row, PLAN_SHIFT)
    wanted = planned(plan, row, PLAN_WANTED)
    first, last = span_of_program(length, BLOCK)
    next_scores = scores_of(ranked, row, first, last, room, BLOCK)  # always a block ahead
    found, left = find(own, wanted, COARSE)
    least = low + (found << shift)  # score in the bin
    if tl.program_id(0) == 0:
        record(plan, row, PLAN_UPPER, found)
        record(plan, row, PLAN_UPPER_LEFT, left)
    for start in range(first, last, BLOCK):
        scores = next_scores
        next_scores = scores_of(ranked, row, start + BLOCK, last, room, BLOCK)
        in_bin = (scores >= least) & (scores < least + (1 << shift))
        digit = tl.where(in_bin, scores - least, 0) >> FINE_BITS
        tl.atomic_add(own + COARSE + digit, tl.full([BLOCK], 1, tl.int32), mask=in_bin, sem="relaxed")


@triton.jit
def fine_kernel(ranked, plan, counts, above, room, shape: tl.constexpr):
    """Finds the bin of the middle histogram, counts the lowest 8 bits in it, and what each program holds.

    Grid (programs, rows). `above [rows, programs, FINE + 1]`: how many keys of the program are forced, or have higher
    upper bits than the threshold, or the same upper bits and a lowest byte of at least 0, 1, ... 256.
    """
    MIDDLE: tl.constexpr = shape.MIDDLE
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    own = counts + row.to(tl.int64) * shape.COUNTS
    length = planned(plan, row, PLAN_LENGTH)
    low = planned(plan, row, PLAN_LOW)
    wanted = planned(plan, row, PLAN_WANTED if MIDDLE == 1 else PLAN_UPPER_LEFT)
    upper_bits = planned(plan, row, PLAN_UPPER) << (planned(plan, row, PLAN_SHIFT) - FINE_BITS) if MIDDLE > 1 else 0
    first, last = span_of_program(length, BLOCK)
    next_scores = scores_of(ranked, row, first, last, room, BLOCK)  # always a block ahead
    found, left = find(own if MIDDLE == 1 else own + COARSE, wanted, COARSE if MIDDLE == 1 else MIDDLE)
    found += upper_bits
    least = low + (found << FINE_BITS)  # score in the bin
    if tl.program_id(0) == 0:
        record(plan, row, PLAN_LEAST, least)
        record(plan, row, PLAN_LEFT, left)
    sure = 0
    held = tl.zeros([FINE], tl.int32)
    for start in range(first, last, BLOCK):
        scores = next_scores
        next_scores = scores_of(ranked, row, start + BLOCK, last, room, BLOCK)
        in_bin = (scores >= least) & (scores < least + FINE)
        # Both counts in one integer: a block has far fewer than 2^16 keys.
        both = tl.sum(((scores >= least + FINE).to(tl.int32) << 16) + in_bin.to(tl.int32), 0)
        sure += both >> 16
        here = both & 0xFFFF
        if here > 0:
            # No mask: Triton may reorder a histogram's values and its mask apart. Bin 0 counts the other keys, too.
            held += tl.histogram(tl.where(in_bin, scores - least, 0), FINE)
            held -= tl.where(tl.arange(0, FINE) == 0, BLOCK - here, 0)
    j = tl.arange(0, FINE)
    mine = above + (row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (FINE + 1)
    tl.store(mine + FINE, sure)
    tl.store(mine + j, sure + tl.sum(held, 0) - tl.cumsum(held, 0) + held)
    tl.atomic_add(own + COARSE + MIDDLE + j, held, mask=held > 0, sem="relaxed")


class CompactShape(NamedTuple):
    """Constants of a compiled kernel: those of `NarrowShape`, and the programs, rounded up to a power of two."""

    MIDDLE: int
    COUNTS: int
    BLOCK: int
    PROGRAMS_UP: int


@triton.jit(do_not_specialize=["width"])
def compact_kernel(ranked, plan, counts, above, indices, room, width, shape: tl.constexpr):
    """Writes `indices [rows, width]`, -1 behind the last token: grid (programs, rows).

    Each program counts what earlier ones write, so the order is always the same, and of equal scores the lower index
    comes first.
    """
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    program = tl.program_id(0)
    length = planned(plan, row, PLAN_LENGTH)
    own_counts = counts + row.to(tl.int64) * shape.COUNTS + COARSE + shape.MIDDLE
    own_left = planned(plan, row, PLAN_LEFT)
    least = planned(plan, row, PLAN_LEAST)
    first, last = span_of_program(length, BLOCK)
    next_scores = scores_of(ranked, row, first, last, room, BLOCK)  # always a block ahead
    lowest, left = find(own_counts, own_left, FINE)
    threshold = least + lowest

    before = tl.arange(0, shape.PROGRAMS_UP)
    held = above + (row.to(tl.int64) * tl.num_programs(0) + before) * (FINE + 1) + lowest
    over = tl.sum(tl.load(held + 1, mask=before < program, other=0), 0)  # keys above the threshold so far
    level = tl.sum(tl.load(held, mask=before < program, other=0), 0) - over  # keys equal to it so far
    own_indices = indices + row.to(tl.int64) * width
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        scores = next_scores
        next_scores = scores_of(ranked, row, start + BLOCK, last, room, BLOCK)
        sure = scores > threshold
        equal = scores == threshold
        # Both counts in one integer: a block has far fewer than 2^16 keys.
        each = (sure.to(tl.int32) << 16) + equal.to(tl.int32)
        so_far = tl.cumsum(each, 0)
        free = tl.maximum(left - level, 0)  # places that earlier keys leave to equal scores
        takes = sure | (equal & ((so_far & 0xFFFF) <= free))
        place = over + tl.minimum(level, left) + (so_far >> 16) + tl.minimum(so_far & 0xFFFF, free) - 1
        tl.store(own_indices + place, at.to(tl.int64), mask=takes & (place < width))
        both = tl.sum(each, 0)
        over += both >> 16
        level += both & 0xFFFF
    # The program with the last tokens, or the first where there are no tokens, writes what is behind them.
    if (last == length) & ((first < last) | ((program == 0) & (length == 0))):
        for start in range(over + tl.minimum(level, left), width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(own_indices + at, tl.full([BLOCK], -1, tl.int64), mask=at < width)
