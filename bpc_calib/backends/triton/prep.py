"""Step 1: projects the queries, rounds them to int8 and plans each row for the later steps."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.constants import (
    COARSE,
    FINE,
    FINE_BITS,
    GAIN_UNIT,
    INT32_MAX,
    INT32_MIN,
    LARGEST_FACTOR,
    LARGEST_LIMIT,
    LARGEST_QUERY,
    RELATIVE_LIMIT,
)
from bpc_calib.backends.triton.language import divide, round_even
from bpc_calib.backends.triton.plan import (
    PLAN_FIRST_TO,
    PLAN_LENGTH,
    PLAN_LIMIT,
    PLAN_LOW,
    PLAN_NEWEST_FROM,
    PLAN_PLACES,
    PLAN_SHIFT,
    PLAN_SIZE,
    PLAN_WANTED,
)

__all__ = ["Given", "PrepShape", "Prepared", "prep_kernel"]


class Prepared(NamedTuple):
    """Where step 1 writes: see `Ranking` of `pipeline`."""

    rounded: Any  # `values` there; in kernels every tuple has an attribute of that name
    totals: Any
    scale: Any
    plan: Any
    best: Any
    coarse: Any
    middle: Any
    fine: Any


class Given(NamedTuple):
    """Tensors that replace the scalars `length` and `k` where these differ between rows; else None."""

    lengths: Any  # integers [B]
    ks: Any  # int32 [rows]
    bounds: Any  # int32 [rows, 3]: real tokens, where the newest of them begin, where the first of them end


class PrepShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G: int
    G_UP: int
    H: int
    D: int
    D_UP: int
    GROUP: str
    GAIN: bool
    MIDDLE: int


@triton.jit(do_not_specialize=["length", "k", "recent", "sink", "share_up", "share_down"])
def prep_kernel(
    query: Strided,
    projection: Strided,
    made: Prepared,
    given: Given,
    length,
    k,
    recent,
    sink,
    share_up,
    share_down,
    scaling,
    shape: tl.constexpr,
):
    """One program per row."""
    H_KV: tl.constexpr = shape.H_KV
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    H: tl.constexpr = shape.H
    D: tl.constexpr = shape.D
    GROUP: tl.constexpr = shape.GROUP
    GAIN: tl.constexpr = shape.GAIN
    MIDDLE: tl.constexpr = shape.MIDDLE
    row = tl.program_id(0)
    b = (row // H_KV).to(tl.int64)
    h = (row % H_KV).to(tl.int64)
    bit = tl.arange(0, H)
    d = tl.arange(0, shape.D_UP)
    g = tl.arange(0, G_UP)

    # q P^T, head by head: too little work for a matrix product. P has the dtype of the query.
    P = tl.load(
        projection.at + b * projection.b + h * projection.h + bit[:, None] * projection.n + d[None, :],
        mask=d[None, :] < D,
        other=0,
    )
    P = P.to(tl.float64 if query.at.dtype.element_ty == tl.float64 else tl.float32)
    own = query.at + b * query.b + h * query.h
    largest = tl.zeros([], P.dtype)
    for head in range(G):
        q = tl.load(own + head * query.n + d, mask=d < D, other=0).to(P.dtype)
        largest = tl.maximum(largest, tl.max(tl.abs(tl.sum(P * q[None, :], 1)), 0))
    # As torch rounds LARGEST_QUERY / largest; where that overflows, values go to the ends of their range.
    inverse = tl.where(
        largest > 0, divide(tl.full([], 1, P.dtype), tl.where(largest > 0, largest, 1)) * LARGEST_QUERY, 0
    )
    most = tl.full([], 0, tl.int32)
    for head in range(G):
        q = tl.load(own + head * query.n + d, mask=d < D, other=0).to(P.dtype)
        exact = tl.sum(P * q[None, :], 1) * inverse
        rounded = round_even(tl.minimum(tl.maximum(exact, -LARGEST_QUERY), LARGEST_QUERY)).to(tl.int32)
        tl.store(made.rounded + (row * G + head) * H + bit, rounded.to(tl.int8))
        tl.store(made.totals + row * G + head, tl.sum(rounded, 0))
        reach = tl.sum(tl.abs(rounded), 0)
        most = most + reach if GROUP == "sum" else tl.maximum(most, reach)
    unit = divide(largest, tl.full([], LARGEST_QUERY, P.dtype)).to(tl.float32)
    tl.store(made.scale + row, unit)

    # Scores lie in [low, low + span]; the later histograms count the lowest `shift` bits of their distance from low.
    most = most * (LARGEST_FACTOR if GAIN else 1)
    if GROUP == "relative":
        span = 5 * G * tl.minimum(2 * most, INT32_MAX // (5 * G))
        low = -span
    else:
        span = 2 * most
        low = -most
    shift = FINE_BITS
    for each in tl.static_range(FINE_BITS, 31):
        shift += ((span >> each) >= COARSE).to(tl.int32)
    product = unit * scaling
    logit = tl.div_rn(tl.full([], GAIN_UNIT if GAIN else 1.0, tl.float32), tl.where(product > 0, product, 1.0))
    limit = tl.where(product > 0, tl.minimum(logit * RELATIVE_LIMIT, LARGEST_LIMIT), LARGEST_LIMIT).to(tl.int32)

    # Which tokens are forced: the newest, then the first, and never more than k of them.
    if given.lengths is not None:
        length = tl.maximum(tl.minimum(tl.load(given.lengths + b).to(tl.int32), length), 0)
    if given.ks is not None:
        k = tl.load(given.ks + row).to(tl.int32)
    newest = tl.minimum(recent, k)
    if given.bounds is not None:
        count = tl.load(given.bounds + 3 * row)
        newest_from = tl.load(given.bounds + 3 * row + 1)
        first_to = tl.load(given.bounds + 3 * row + 2)
        first = tl.minimum(sink, tl.minimum(k, count) - newest)
    else:
        newest_from = length - newest
        first = tl.minimum(sink, tl.minimum(k, length) - newest)
        first_to = first
    wanted = k - newest - first
    places = tl.minimum((k.to(tl.int64) * share_up // share_down).to(tl.int32), wanted)
    at = made.plan + row * PLAN_SIZE
    tl.store(at + PLAN_LENGTH, length)
    tl.store(at + PLAN_NEWEST_FROM, newest_from)
    tl.store(at + PLAN_FIRST_TO, first_to)
    tl.store(at + PLAN_PLACES, places)
    tl.store(at + PLAN_WANTED, wanted)
    tl.store(at + PLAN_LOW, low)
    tl.store(at + PLAN_SHIFT, shift)
    tl.store(at + PLAN_LIMIT, limit)

    tl.store(made.best + row * G_UP + g, tl.full([G_UP], INT32_MIN, tl.int32))
    tl.store(made.coarse + row * COARSE + tl.arange(0, COARSE), tl.zeros([COARSE], tl.int32))
    tl.store(made.middle + row * MIDDLE + tl.arange(0, MIDDLE), tl.zeros([MIDDLE], tl.int32))
    tl.store(made.fine + row * FINE + tl.arange(0, FINE), tl.zeros([FINE], tl.int32))
