"""Step 3, only with a safeguard: forces the tokens whose keys are coded worst."""

import triton
import triton.language as tl

from bpc_calib.backends.triton.language import FORCED, NEVER
from bpc_calib.backends.triton.plan import (
    PLAN_LENGTH,
    PLAN_LOW,
    PLAN_PLACES,
    PLAN_SHIFT,
    PLAN_WANTED,
    planned,
    record,
)

__all__ = ["guard_kernel"]


@triton.jit(do_not_specialize=["count", "worst_r"])
def guard_kernel(worst, plan, ranked, counts, count, worst_r, room, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Forces tokens of the lists `worst [rows, count]`, in order, until the places of the row are filled: grid (rows).

    -1 in a list is no token, and no token is in a list twice. A forced token leaves the histogram of the scores.
    """
    row = tl.program_id(0)
    length = planned(plan, row, PLAN_LENGTH)
    places = planned(plan, row, PLAN_PLACES)
    low = planned(plan, row, PLAN_LOW)
    shift = planned(plan, row, PLAN_SHIFT)
    wanted = planned(plan, row, PLAN_WANTED)
    own_worst = worst + row.to(tl.int64) * worst_r
    own_ranked = ranked + row.to(tl.int64) * room
    own_counts = counts + row.to(tl.int64) * COUNTS
    taken = 0
    first = 0
    while (taken < places) & (first < count):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(own_worst + at, mask=at < count, other=-1)
        listed = (token >= 0) & (token < length)
        score = tl.load(own_ranked + token, mask=listed, other=NEVER)
        free = listed & (score != FORCED) & (score != NEVER)
        takes = free & (taken + tl.cumsum(free.to(tl.int32), 0) <= places)
        tl.store(own_ranked + token, tl.full([BLOCK], FORCED, tl.int32), mask=takes)
        digit = (tl.where(takes, score, low) - low) >> shift
        tl.atomic_add(own_counts + digit, tl.full([BLOCK], -1, tl.int32), mask=takes, sem="relaxed")
        taken += tl.sum(takes.to(tl.int32), 0)
        first += BLOCK
    tl.debug_barrier()  # until all warps have read it
    record(plan, row, PLAN_WANTED, wanted - taken)
