"""Step 4: finds the least score of the chosen keys, digit by digit: its upper 7 bits, the middle ones, the lowest 8.

Step 2 counts the upper digit. Each later histogram counts only the few keys in the bin found before it.
"""

import triton
import triton.language as tl

from bpc_calib.backends.triton.constants import COARSE, FINE, FINE_BITS, FORCED, NEVER
from bpc_calib.backends.triton.plan import PLAN_LENGTH, PLAN_LOW, PLAN_SHIFT, PLAN_WANTED, planned

__all__ = ["distances", "find", "fine_kernel", "middle_kernel", "upper_kernel"]


@triton.jit
def find(histogram, wanted, BINS: tl.constexpr):
    """The highest bin that, with those above it, holds at least `wanted` keys, and how many keys of it are needed."""
    PART: tl.constexpr = BINS if BINS < 2048 else 2048  # at most so many at a time: they are kept in registers
    above = 0
    reaching = 0
    short = 0  # keys in the bins above the one searched for
    for part in range(0, BINS, PART):  # from the top
        counts = tl.load(histogram + BINS - PART - part + tl.arange(0, PART))
        total = tl.sum(counts, 0)
        from_here = above + total - tl.cumsum(counts, 0) + counts
        reaching += tl.sum((from_here >= wanted).to(tl.int32), 0)
        short = tl.maximum(short, tl.max(tl.where(from_here < wanted, from_here, 0), 0))
        above += total
    return tl.maximum(reaching - 1, 0), wanted - short


@triton.jit
def upper_kernel(coarse, middle, plan, threshold, MIDDLE: tl.constexpr):
    """`threshold [rows, 2]`: all but its lowest 8 bits, and how many keys with these bits are needed; grid (rows)."""
    row = tl.program_id(0)
    found, left = find(coarse + row * COARSE, planned(plan, row, PLAN_WANTED), COARSE)
    if MIDDLE > 1:
        next_found, left = find(middle + row * MIDDLE, left, MIDDLE)
        found = (found << (planned(plan, row, PLAN_SHIFT) - FINE_BITS)) + next_found
    tl.store(threshold + row * 2, found)
    tl.store(threshold + row * 2 + 1, left)


@triton.jit
def distances(ranked, plan, row, at, length, ranked_r):
    """How far scores are above the least possible one; which are forced; which rank, neither forced nor padding."""
    score = tl.load(ranked + row.to(tl.int64) * ranked_r + at, mask=at < length, other=NEVER)
    ranks = (score != FORCED) & (score != NEVER)
    low = planned(plan, row, PLAN_LOW)
    return tl.where(ranks, score, low) - low, score == FORCED, ranks


@triton.jit
def middle_kernel(ranked, plan, coarse, middle, ranked_r, MIDDLE: tl.constexpr, BLOCK: tl.constexpr):
    """Histogram `middle [rows, MIDDLE]` of the next bits in the coarse bin: grid (blocks of keys, rows)."""
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = planned(plan, row, PLAN_LENGTH)
    if tl.program_id(0) * BLOCK < length:
        found, _ = find(coarse + row * COARSE, planned(plan, row, PLAN_WANTED), COARSE)
        distance, _, ranks = distances(ranked, plan, row, at, length, ranked_r)
        shift = planned(plan, row, PLAN_SHIFT)
        in_bin = ranks & ((distance >> shift) == found)
        digit = (distance >> FINE_BITS) & ((1 << (shift - FINE_BITS)) - 1)
        ones = tl.full([BLOCK], 1, tl.int32)
        tl.atomic_add(middle + row * MIDDLE + digit, ones, mask=in_bin, sem="relaxed")


@triton.jit(do_not_specialize=["blocks"])
def fine_kernel(ranked, plan, threshold, fine, above, ranked_r, blocks, BLOCK: tl.constexpr):
    """Histogram `fine [rows, FINE]` of the lowest 8 bits, and what each block holds: grid as above.

    `above [rows, blocks, FINE + 1]`: how many keys of the block are forced, or have higher upper bits than the
    threshold, or the same upper bits and a lowest byte of at least 0, 1, ... 256.
    """
    row = tl.program_id(1)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    length = planned(plan, row, PLAN_LENGTH)
    if block * BLOCK < length:
        found = tl.load(threshold + row * 2)
        distance, forced, ranks = distances(ranked, plan, row, at, length, ranked_r)
        sure = tl.sum((forced | (ranks & ((distance >> FINE_BITS) > found))).to(tl.int32), 0)
        in_bin = ranks & ((distance >> FINE_BITS) == found)
        j = tl.arange(0, FINE)
        mine = above + (row.to(tl.int64) * blocks + block) * (FINE + 1)
        tl.store(mine + FINE, sure)
        if tl.sum(in_bin.to(tl.int32), 0) > 0:
            counts = tl.histogram(distance & (FINE - 1), FINE, mask=in_bin)
            tl.atomic_add(fine + row * FINE + j, counts, mask=counts > 0, sem="relaxed")
            tl.store(mine + j, sure + tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts)
        else:
            tl.store(mine + j, tl.zeros([FINE], tl.int32) + sure)
