"""Step 5: the indices of the chosen tokens, ascending."""

import triton
import triton.language as tl

from bpc_calib.backends.triton.constants import FINE, FINE_BITS
from bpc_calib.backends.triton.narrow import distances, find
from bpc_calib.backends.triton.plan import PLAN_LENGTH, planned

__all__ = ["compact_kernel"]


@triton.jit(do_not_specialize=["blocks", "width"])
def compact_kernel(
    ranked,
    plan,
    threshold,
    fine,
    above,
    indices,
    ranked_r,
    blocks,
    width,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes `indices [rows, width]`: grid (blocks of keys, rows).

    Each block counts what earlier blocks write, so the order is always the same, and of equal scores the lower index
    comes first.
    """
    row = tl.program_id(1)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    length = planned(plan, row, PLAN_LENGTH)
    if block * BLOCK < length:
        lowest, left = find(fine + row * FINE, tl.load(threshold + row * 2 + 1), FINE)
        last = (tl.load(threshold + row * 2) << FINE_BITS) + lowest
        distance, forced, ranks = distances(ranked, plan, row, at, length, ranked_r)

        before = tl.arange(0, BLOCKS_UP)
        held = above + (row.to(tl.int64) * blocks + before) * (FINE + 1) + lowest
        over = tl.sum(tl.load(held + 1, mask=before < block, other=0), 0)
        level = tl.sum(tl.load(held, mask=before < block, other=0), 0) - over
        free = tl.maximum(left - level, 0)  # places that earlier blocks leave to equal scores

        sure = forced | (ranks & (distance > last))
        equal = ranks & (distance == last)
        # Both counts in one integer: a block has far fewer than 2^16 keys.
        so_far = tl.cumsum((sure.to(tl.int32) << 16) + equal.to(tl.int32), 0)
        takes = sure | (equal & ((so_far & 0xFFFF) <= free))
        place = over + tl.minimum(level, left) + (so_far >> 16) + tl.minimum(so_far & 0xFFFF, free) - 1
        tl.store(indices + row.to(tl.int64) * width + place, at.to(tl.int64), mask=takes & (place < width))
