"""Step 5: the indices of the chosen tokens, ascending."""

from typing import NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.constants import COARSE, FINE
from bpc_calib.backends.triton.narrow import find, scores_of
from bpc_calib.backends.triton.plan import PLAN_LEAST, PLAN_LEFT, PLAN_LENGTH, planned, share

__all__ = ["CompactShape", "compact_kernel"]


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
    first, last = share(length, BLOCK)
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
