"""Step 5: the indices of the chosen tokens, ascending."""

import triton
import triton.language as tl

from bpc_calib.kernels.narrow import distances, find, upper

__all__ = ["compact_kernel"]


@triton.jit(do_not_specialize=["blocks", "width"])
def compact_kernel(
    ranked,
    plan,
    coarse,
    middle,
    fine,
    above,
    indices,
    ranked_r,
    blocks,
    width,
    COARSE: tl.constexpr,
    MIDDLE: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes `indices [rows, width]`: grid (blocks of keys, rows).

    Where a block writes is counted, not claimed, so the order never changes, and of equal scores the lower index
    comes first.
    """
    row = tl.program_id(1)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(plan + row * 8)
    if block * BLOCK < length:
        found, left = upper(coarse, middle, plan, row, COARSE, MIDDLE)
        lowest, left = find(fine + row * 256, left, 256)
        threshold = (found << 8) + lowest
        distance, forced, ranks = distances(ranked, plan, row, at, length, ranked_r)

        before = tl.arange(0, BLOCKS_UP)
        held = above + (row.to(tl.int64) * blocks + before) * 257 + lowest
        at_least = tl.sum(tl.load(held, mask=before < block, other=0), 0)
        over = tl.sum(tl.load(held + 1, mask=before < block, other=0), 0)

        equal = ranks & (distance == threshold)
        takes = equal & (at_least - over + tl.cumsum(equal.to(tl.int32), 0) <= left)
        takes = takes | forced | (ranks & (distance > threshold))
        place = over + tl.minimum(at_least - over, left) + tl.cumsum(takes.to(tl.int32), 0) - 1
        tl.store(indices + row.to(tl.int64) * width + place, at.to(tl.int64), mask=takes & (place < width))
