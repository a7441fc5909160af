"""Step 2: one integer per key and KV head to rank by, and a histogram of its upper bits."""

from typing import NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided, head_of, token_at
from bpc_calib.backends.triton.language import COARSE, FORCED, GAIN_OFFSET, NEVER
from bpc_calib.backends.triton.limits import Limits, counted
from bpc_calib.backends.triton.plan import (
    PLAN_FIRST_TO,
    PLAN_LENGTH,
    PLAN_LIMIT,
    PLAN_LOW,
    PLAN_NEWEST_FROM,
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
    PARTS_UP: int  # programs that left their best scores
    COUNTS: int
    BLOCK: int
    PAGE: int  # tokens of a page; 0: gains lie in rows


@triton.jit
def grouped(scores, best, limit, padded: tl.constexpr, shape: tl.constexpr):
    """`bpc_calib.method.scoring.group_scores`: `[BLOCK]` of `scores [BLOCK, G_UP]`."""
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    real = tl.arange(0, G_UP)[None, :] < G
    if shape.GROUP == "sum":
        return tl.sum(scores, 1)  # the scores of padding heads are 0
    elif shape.GROUP == "max":
        return tl.max(scores if G == G_UP else tl.where(real, scores, NEVER), 1)
    else:
        # With 16 heads and fewer, the clamp of `group_scores` changes nothing.
        below = scores - best[None, :]
        if padded:
            below = tl.minimum(below, 0)  # padding is not among the best and may be above them
        nearest = below if G == G_UP else tl.where(real, below, NEVER)
        within = tl.maximum(below, -limit)
        within = within if G == G_UP else tl.where(real, within, 0)
        return 4 * G * tl.max(nearest, 1) + tl.sum(within, 1)


@triton.jit(do_not_specialize=["parts"])
def rank_kernel(heads, gain: Strided, best, plan, limits: Limits, ranked, counts, room, parts, shape: tl.constexpr):
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
    bests = tl.zeros([G_UP], tl.int32)
    if shape.GROUP == "relative":
        part = tl.arange(0, shape.PARTS_UP)
        of_part = best + (row.to(tl.int64) * parts + part[:, None]) * G_UP + g[None, :]
        bests = tl.max(tl.load(of_part, mask=part[:, None] < parts, other=NEVER), 0)
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
        score = grouped(scores, bests, limit, limits.valid is not None, shape)
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
