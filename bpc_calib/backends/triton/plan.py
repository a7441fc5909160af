"""What is known of a row (a KV head of a sequence), int32 each, and which tokens a program of a row sees."""

import triton
import triton.language as tl

__all__ = [
    "PLAN_FIRST_TO", "PLAN_LEAST", "PLAN_LEFT", "PLAN_LENGTH", "PLAN_LIMIT", "PLAN_LOW", "PLAN_NEWEST_FROM",
    "PLAN_PLACES", "PLAN_SHIFT", "PLAN_SIZE", "PLAN_UPPER", "PLAN_UPPER_LEFT", "PLAN_WANTED", "SIDE_BY_SIDE", "planned",
    "record", "share", "whole",
]  # fmt: skip

# `score` writes these.
PLAN_LENGTH = tl.constexpr(0)  # tokens in use
PLAN_NEWEST_FROM = tl.constexpr(1)  # the newest tokens, from this one on, are forced
PLAN_FIRST_TO = tl.constexpr(2)  # the first tokens before this one are forced
PLAN_PLACES = tl.constexpr(3)  # tokens that the safeguard may force
PLAN_WANTED = tl.constexpr(4)  # tokens to choose beside the forced ones; `guard` lowers it
PLAN_LOW = tl.constexpr(5)  # the least score there can be
PLAN_SHIFT = tl.constexpr(6)  # bits of a score below those that the first histogram counts
PLAN_LIMIT = tl.constexpr(7)  # as in `group_scores`
# `middle` writes these.
PLAN_UPPER = tl.constexpr(8)  # the threshold's bin in the first histogram
PLAN_UPPER_LEFT = tl.constexpr(9)  # how many keys of this bin are needed
# `fine` writes these.
PLAN_LEAST = tl.constexpr(10)  # the least score that has all bits of the threshold but the lowest 8
PLAN_LEFT = tl.constexpr(11)  # how many keys with these bits are needed
PLAN_SIZE = tl.constexpr(16)

# Rows of scores hold a multiple of so many tokens, all written: kernels then load several at once, whatever the length.
SIDE_BY_SIDE = tl.constexpr(16)


@triton.jit
def planned(plan, row, slot: tl.constexpr):
    """One slot of one row of `plan [rows, PLAN_SIZE]`."""
    return tl.load(plan + row * PLAN_SIZE + slot)


@triton.jit
def record(plan, row, slot: tl.constexpr, value):
    """Writes one slot of one row of `plan [rows, PLAN_SIZE]`."""
    tl.store(plan + row * PLAN_SIZE + slot, value)


@triton.jit
def share(length, BLOCK: tl.constexpr):
    """The tokens `first` to `last` of this program: whole blocks, in the order of the programs; maybe none."""
    size = tl.cdiv(tl.cdiv(length, BLOCK), tl.num_programs(0)) * BLOCK
    # Not clipped to the length: the compiler sees a multiple of a block. In 64 bits, so that no length can overflow.
    first = (tl.program_id(0).to(tl.int64) * size).to(tl.int32)
    return first, tl.minimum(first + size, length)


@triton.jit
def whole(length):
    """The tokens of a row of scores, with those behind its length that fill it up."""
    return tl.cdiv(length, SIDE_BY_SIDE) * SIDE_BY_SIDE
