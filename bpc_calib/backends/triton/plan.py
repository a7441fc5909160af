"""What is known of a row (a KV head of a sequence), int32 each, and which tokens a program of a row sees."""

import triton
import triton.language as tl

from bpc_calib.backends.triton.language import (
    COARSE,
    FINE_BITS,
    GAIN_UNIT,
    INT32_MAX,
    LARGEST_FACTOR,
    LARGEST_LIMIT,
    LARGEST_OCTAVE,
    LN2,
    OCTAVES,
    RELATIVE_LIMIT,
)
from bpc_calib.backends.triton.limits import Limits

__all__ = [
    "PLAN_FIRST_TO", "PLAN_LEAST", "PLAN_LEFT", "PLAN_LENGTH", "PLAN_LIMIT", "PLAN_LOW", "PLAN_NEWEST_FROM",
    "PLAN_OCTAVE", "PLAN_PLACES", "PLAN_SHIFT", "PLAN_SIZE", "PLAN_UPPER", "PLAN_UPPER_LEFT", "PLAN_WANTED",
    "SIDE_BY_SIDE", "make_plan", "planned", "record", "span_of_program", "whole",
]  # fmt: skip

# `query` writes these.
PLAN_LENGTH = tl.constexpr(0)  # tokens in use
PLAN_NEWEST_FROM = tl.constexpr(1)  # the newest tokens, from this one on, are forced
PLAN_FIRST_TO = tl.constexpr(2)  # the first tokens before this one are forced
PLAN_PLACES = tl.constexpr(3)  # tokens that the safeguard may force
PLAN_WANTED = tl.constexpr(4)  # tokens to choose beside the forced ones; `guard` lowers it
PLAN_LOW = tl.constexpr(5)  # the least score there can be
PLAN_SHIFT = tl.constexpr(6)  # bits of a score below those that the first histogram counts
PLAN_LIMIT = tl.constexpr(7)  # as in `group_scores`
PLAN_OCTAVE = tl.constexpr(8)  # as in `denominators` of `rank`
# `middle` writes these.
PLAN_UPPER = tl.constexpr(9)  # the threshold's bin in the first histogram
PLAN_UPPER_LEFT = tl.constexpr(10)  # how many keys of this bin are needed
# `fine` writes these.
PLAN_LEAST = tl.constexpr(11)  # the least score that has all bits of the threshold but the lowest 8
PLAN_LEFT = tl.constexpr(12)  # how many keys with these bits are needed
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
def span_of_program(length, BLOCK: tl.constexpr):
    """The tokens `first` to `last` of this program: whole blocks, in the order of the programs; maybe none."""
    size = tl.cdiv(tl.cdiv(length, BLOCK), tl.num_programs(0)) * BLOCK
    # Not clipped to the length: the compiler sees a multiple of a block. In 64 bits, so that no length can overflow.
    first = (tl.program_id(0).to(tl.int64) * size).to(tl.int32)
    return first, tl.minimum(first + size, length)


@triton.jit
def whole(length):
    """The tokens of a row of scores, with those behind its length that fill it up."""
    return tl.cdiv(length, SIDE_BY_SIDE) * SIDE_BY_SIDE


@triton.jit
def make_plan(plan, limits: Limits, row, length, k, most, scale, scaling, shape: tl.constexpr):
    """Writes what the later steps know of a row; no score without the gain is above `most`, or below `-most`."""
    G: tl.constexpr = shape.G
    product = scale * scaling
    logit = tl.div_rn(tl.full([], GAIN_UNIT if shape.GAIN else 1.0, tl.float32), tl.where(product > 0, product, 1.0))
    limit = tl.where(product > 0, tl.minimum(logit * RELATIVE_LIMIT, LARGEST_LIMIT), LARGEST_LIMIT).to(tl.int32)
    octave = tl.minimum(tl.maximum(logit * LN2, 1.0), LARGEST_OCTAVE)
    octave = tl.where(product > 0, octave, LARGEST_OCTAVE).to(tl.int32)
    # Scores lie in [low, low + span]; the later histograms count the lowest `shift` bits of their distance from low.
    most = most * (LARGEST_FACTOR if shape.GAIN else 1)
    if shape.GROUP == "relative":
        span = 5 * G * tl.minimum(2 * most + OCTAVES * octave, INT32_MAX // (5 * G))
        low = -span
    else:
        span = 2 * most
        low = -most
    shift = FINE_BITS
    for each in tl.static_range(FINE_BITS, 31):
        shift += ((span >> each) >= COARSE).to(tl.int32)

    # Which tokens are forced: the newest, then the first, and never more than k of them.
    newest = tl.minimum(k, limits.recent)
    if limits.bounds is not None:
        count = tl.load(limits.bounds + 3 * row)
        newest_from = tl.load(limits.bounds + 3 * row + 1)
        first_to = tl.load(limits.bounds + 3 * row + 2)
        first = tl.minimum(tl.minimum(k, count) - newest, limits.sink)
    else:
        newest_from = length - newest
        first = tl.minimum(tl.minimum(k, length) - newest, limits.sink)
        first_to = first
    wanted = k - newest - first
    places = tl.minimum((k.to(tl.int64) * limits.numerator // limits.denominator).to(tl.int32), wanted)
    record(plan, row, PLAN_LENGTH, length)
    record(plan, row, PLAN_NEWEST_FROM, newest_from)
    record(plan, row, PLAN_FIRST_TO, first_to)
    record(plan, row, PLAN_PLACES, places)
    record(plan, row, PLAN_WANTED, wanted)
    record(plan, row, PLAN_LOW, low)
    record(plan, row, PLAN_SHIFT, shift)
    record(plan, row, PLAN_LIMIT, limit)
    record(plan, row, PLAN_OCTAVE, octave)
