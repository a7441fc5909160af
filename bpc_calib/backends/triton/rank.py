"""Step 2: one integer per key and KV head to rank by, and a histogram of its upper bits."""

from typing import NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided, head_of, token_at
from bpc_calib.backends.triton.language import COARSE, FORCED, GAIN_OFFSET, NEVER, STRIPES
from bpc_calib.backends.triton.limits import Limits, counted
from bpc_calib.backends.triton.plan import (
    PLAN_FIRST_TO,
    PLAN_LENGTH,
    PLAN_LIMIT,
    PLAN_LOW,
    PLAN_NEWEST_FROM,
    PLAN_OCTAVE,
    PLAN_SHIFT,
    planned,
    span_of_program,
    whole,
)

__all__ = ["RankShape", "rank_kernel"]


class RankShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G: int
    G_UP: int
    GROUP: str
    GAIN: bool
    FORCES: bool  # whether the newest or the first tokens are forced
    COUNTS: int
    BLOCK: int
    PAGE: int  # tokens of a page; 0: gains lie in rows


@triton.jit
def denominators(best, row, octave, G_UP: tl.constexpr):
    """`bpc_calib.method.scoring.group_scores`: the logarithms of the denominators, `[G_UP]`."""
    g = tl.arange(0, G_UP)
    stripe = row.to(tl.int64) * STRIPES + tl.arange(0, STRIPES)
    scores = tl.load(best + stripe[:, None] * G_UP + g[None, :])
    most = tl.max(scores, 0)
    wide = octave.to(tl.float32)
    below = ((most[None, :] - scores).to(tl.float32) * tl.div_rn(tl.full([], 128, tl.float32), wide)).to(tl.int32)
    total = tl.sum((256 - (below & 127) << 15) >> tl.minimum(below >> 7, 31), 0)
    above = (total.to(tl.float32).to(tl.int32, bitcast=True) >> 16) - (150 << 7)
    return most + (above.to(tl.float32) * (wide / 128)).to(tl.int32)


@triton.jit
def grouped(scores, sums, limit, padded: tl.constexpr, shape: tl.constexpr):
    """`bpc_calib.method.scoring.group_scores`: `[BLOCK]` of `scores [BLOCK, G_UP]`."""
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    real = tl.arange(0, G_UP)[None, :] < G
    if shape.GROUP == "max":
        return tl.max(scores if G == G_UP else tl.where(real, scores, NEVER), 1)
    else:
        # With 16 heads and fewer, the clamp of `group_scores` changes nothing.
        below = scores - sums[None, :]
        if padded:
            below = tl.minimum(below, 0)  # padding is in no denominator and may be above it
        nearest = below if G == G_UP else tl.where(real, below, NEVER)
        within = tl.maximum(below, -limit)
        within = within if G == G_UP else tl.where(real, within, 0)
        return 4 * G * tl.max(nearest, 1) + tl.sum(within, 1)


@triton.jit
def rank_kernel(heads, gain: Strided, best, plan, limits: Limits, ranked, counts, room, shape: tl.constexpr):
    """`ranked [rows, room]`, and the first histogram of `counts [rows, COUNTS]`: grid (programs, rows).

    Bin 0 of the histogram counts too many: forced tokens and padding. `find` does not depend on it.
    """
    G_UP: tl.constexpr = shape.G_UP
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    g = tl.arange(0, G_UP)
    length = planned(plan, row, PLAN_LENGTH)
    newest_from = planned(plan, row, PLAN_NEWEST_FROM)
    first_to = planned(plan, row, PLAN_FIRST_TO)
    low = planned(plan, row, PLAN_LOW)
    shift = planned(plan, row, PLAN_SHIFT)
    limit = planned(plan, row, PLAN_LIMIT)
    sums = tl.zeros([G_UP], tl.int32)
    if shape.GROUP == "relative":
        sums = denominators(best, row, planned(plan, row, PLAN_OCTAVE), G_UP)
    held = tl.zeros([COARSE], tl.int32)
    first, last = span_of_program(length, BLOCK)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < whole(length)
        of_key = heads + (row.to(tl.int64) * room + at)[:, None] * G_UP + g[None, :]
        scores = tl.load(of_key, mask=inside[:, None], other=0).to(tl.int32)
        if shape.GAIN:
            of_gain = head_of(gain, b, h) + token_at(gain, b, at, at < length, shape.PAGE)
            gains = tl.load(of_gain, mask=at < length, other=0).to(tl.int32)
            scores = scores * (gains + GAIN_OFFSET)[:, None]
        score = grouped(scores, sums, limit, limits.valid is not None, shape)
        real = counted(limits, b, at, length)
        stored = tl.where(real, score, NEVER)
        ranks = real
        if shape.FORCES:
            forced = real & ((at >= newest_from) | (at < first_to))
            stored = tl.where(forced, FORCED, stored)
            ranks = real & ~forced
        tl.store(ranked + row.to(tl.int64) * room + at, stored, mask=inside)
        # No mask: Triton may reorder a histogram's values and its mask apart.
        held += tl.histogram(tl.where(ranks, (score - low) >> shift, 0), COARSE)
    if first < last:
        own_counts = counts + row.to(tl.int64) * shape.COUNTS
        tl.atomic_add(own_counts + tl.arange(0, COARSE), held, mask=held > 0, sem="relaxed")
