"""What is known of a row (a KV head of a sequence), int32 each: step 1 writes it, and the later steps read it."""

import triton
import triton.language as tl

__all__ = [
    "PLAN_FIRST_TO", "PLAN_LENGTH", "PLAN_LIMIT", "PLAN_LOW", "PLAN_NEWEST_FROM", "PLAN_PLACES", "PLAN_SHIFT",
    "PLAN_SIZE", "PLAN_WANTED", "planned",
]  # fmt: skip

PLAN_LENGTH = tl.constexpr(0)  # tokens in use
PLAN_NEWEST_FROM = tl.constexpr(1)  # the newest tokens, from this one on, are forced
PLAN_FIRST_TO = tl.constexpr(2)  # the first tokens before this one are forced
PLAN_PLACES = tl.constexpr(3)  # tokens that the safeguard may force
PLAN_WANTED = tl.constexpr(4)  # tokens to choose beside the forced ones
PLAN_LOW = tl.constexpr(5)  # the least score there can be
PLAN_SHIFT = tl.constexpr(6)  # bits of a score below those that the first histogram counts
PLAN_LIMIT = tl.constexpr(7)  # as in `group_scores`
PLAN_SIZE = tl.constexpr(8)


@triton.jit
def planned(plan, row, slot: tl.constexpr):
    """One slot of one row of `plan [rows, PLAN_SIZE]`."""
    return tl.load(plan + row * PLAN_SIZE + slot)
