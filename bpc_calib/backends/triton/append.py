"""Few new tokens, each hashed by a program of its own; key and value are written, too, into buffers of fixed size."""

from typing import NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.encode import Hashing, Products, by_first, finish, greedy, keep
from bpc_calib.backends.triton.language import fetch

__all__ = ["AppendShape", "append_kernel", "centred", "loaded", "stored"]

COPIES = tl.constexpr(4)  # of the greedy pass: one per warp
UNROLL = tl.constexpr(16)  # rows of the Gram matrix that it loads at once; with 32 Triton compiles for 6 s more


class AppendShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    H: int
    R: int  # rows of the projection: H of signs, 4 H of nibbles
    COLUMNS: int  # products that a program takes of a key: all of signs
    D: int
    D_UP: int
    V: int  # dimensions of a value
    V_UP: int
    PART: int  # dimensions of the projection at a time
    ROWS: int  # rows of the metric at a time
    PAGE: int  # tokens of a page of codes and gains; 0: they lie in rows


@triton.jit
def centred(key, mean, d, D: tl.constexpr):
    """The dimensions `d` of a key, less the mean, in float32 (float64)."""
    x = tl.load(key + d, mask=d < D, other=0)
    x = x.to(tl.float64) if x.dtype == tl.float64 else x.to(tl.float32)
    if mean is not None:
        x = x - tl.load(mean + d, mask=d < D, other=0)
    return x


@triton.jit
def loaded(new: Strided, b, h, n, SIZE: tl.constexpr, UP: tl.constexpr):
    """The new vector `n` of one head."""
    d = tl.arange(0, UP)
    return tl.load(new.at + b * new.b + h * new.h + n * new.n + d, mask=d < SIZE, other=0)


@triton.jit
def stored(vector, to: Strided, b, h, place, SIZE: tl.constexpr, UP: tl.constexpr):
    """Writes the vector of one head into its buffer, by the first of the programs that share it."""
    d = tl.arange(0, UP)
    tl.store(to.at + b * to.b + h * to.h + place * to.n + d, vector, mask=(d < SIZE) & by_first(d))


@triton.jit
def append_kernel(
    key: Strided,
    value: Strided,
    place,
    encoder: Hashing,
    products: Products,
    keys: Strided,
    values: Strided,
    codes: Strided,
    gain: Strided,
    error: Strided,
    shape: tl.constexpr,
):
    """Writes slots `place` of the buffers, 0 and on without `place`. Grid (rows, tokens, parts of the products).

    With `products` these in place of codes. Without `keys` only what hashing makes of the keys, and nothing at a slot
    below 0; without `codes` only keys and values.

    All warps share the products, and each makes the greedy pass for itself, over a copy: so its steps need no barrier.
    """
    H: tl.constexpr = shape.H
    R: tl.constexpr = shape.R
    COLUMNS: tl.constexpr = shape.COLUMNS
    D: tl.constexpr = shape.D
    D_UP: tl.constexpr = shape.D_UP
    PART: tl.constexpr = shape.PART
    ROWS: tl.constexpr = shape.ROWS
    row = tl.program_id(0)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    at = n
    if place is not None:
        at = tl.load(place + n).to(tl.int64)
    if keys.at is not None:
        stored(loaded(key, b, h, n, D, D_UP), keys, b, h, at, D, D_UP)
        stored(loaded(value, b, h, n, shape.V, shape.V_UP), values, b, h, at, shape.V, shape.V_UP)
    if codes.at is not None:
        own = b * encoder.b + h
        wide = encoder.gram.dtype.element_ty
        gram = encoder.gram + own * (R * R)
        part_of_gram = gram + tl.program_id(2).to(tl.int64) * (COLUMNS * R)
        fetch(part_of_gram, COLUMNS * R * (wide.primitive_bitwidth // 8))  # a search for codes reads it last
        matrix = encoder.matrix + own * (D * R)
        mean = encoder.mean
        if mean is not None:
            mean += own * D
        own_key = key.at + b * key.b + h * key.h + n * key.n
        r = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        terms = tl.zeros([COLUMNS, PART], wide)
        for first in tl.range(0, D, PART, loop_unroll_factor=2):  # more parts at once would not fit the registers
            part = first + tl.arange(0, PART)
            P = tl.load(matrix + r[:, None] * D + part[None, :], mask=part[None, :] < D, other=0)
            terms += P * centred(own_key, mean, part, D)[None, :]
        d = tl.arange(0, D_UP)
        x = centred(own_key, mean, d, D)
        squared_norm = tl.sum(x * x, 0)
        if encoder.metric is not None:
            metric = encoder.metric + own * (D * D)
            squares = tl.zeros([ROWS, D_UP], wide)
            for first in tl.range(0, D, ROWS, loop_unroll_factor=2):
                e = first + tl.arange(0, ROWS)
                inside = (e[:, None] < D) & (d[None, :] < D) & by_first(d)[None, :]
                M = tl.load(metric + e[:, None] * D + d[None, :], mask=inside, other=0)
                rows = x if ROWS == D_UP else centred(own_key, mean, e, D)
                squares += M * rows[:, None] * x[None, :]
            squared_norm = tl.sum(tl.sum(squares, 1), 0)
        scores = tl.sum(terms, 1)[None, :]
        if products.scores is not None:
            of_key = row.to(tl.int64) * tl.num_programs(1) + n + tl.zeros([1], tl.int64)
            norms = tl.zeros([1], wide) + squared_norm
            keep(products, scores, norms, of_key, r, of_key >= 0, R)
        else:
            copy = tl.arange(0, COPIES)
            norms = tl.zeros([COPIES], wide) + squared_norm
            low, high, squared_error, product = greedy(
                tl.broadcast_to(scores, [COPIES, H]), norms, gram, H, COPIES, UNROLL
            )
            inside = copy < tl.where(at >= 0, 1, 0)
            if shape.PAGE:
                b = at // shape.PAGE
                at = at % shape.PAGE
            own_gain = gain.at
            if own_gain is not None:
                own_gain += b * gain.b + h * gain.h + at * gain.n + copy
            own_error = error.at
            if own_error is not None:
                own_error += b * error.b + h * error.h + at * error.n + copy
            own_codes = codes.at + b * codes.b + h * codes.h + at * codes.n + copy
            finish(low, high, squared_error, product, norms, own_codes, own_error, own_gain, inside, H)
