"""Hashing of keys: one matrix product, then for signs the greedy pass of Algorithm 2 in Gram form, in registers."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.language import GAIN_MAX, GAIN_OFFSET, GAIN_ONE, GAIN_UNIT, divide, dot, round_even

__all__ = [
    "EncodeShape", "Hashing", "Products", "by_first", "deliver", "encode_kernel", "finish", "greedy", "greedy_kernel",
    "keep", "only", "part_of",
]  # fmt: skip


class Hashing(NamedTuple):
    """What keys are hashed with: the parts of an `Encoder`, contiguous, with the matrix transposed."""

    matrix: Any  # [.., R, D]
    gram: Any  # [.., R, R]
    metric: Any  # [.., D, D] or None
    mean: Any  # [.., D] or None
    b: int  # 0 where all sequences share the projections, H_KV where each has its own


class Products(NamedTuple):
    """What a search for nibbles reads, contiguous; both None: the codes are signs."""

    scores: Any  # [B * H_KV, n, R]
    squared_norm: Any  # [B * H_KV, n]


class EncodeShape(NamedTuple):
    """Constants of a compiled kernel."""

    H_KV: int
    H: int
    R: int  # rows of the projection: H of signs, 4 H of nibbles
    COLUMNS: int  # products that a program takes of a key: all of signs
    D: int
    PART: int  # dimensions of the keys at a time
    BLOCK: int
    PAGE: int  # tokens of a page; 0: codes and gains are written in order


@triton.jit
def only(mine, x, WARP: tl.constexpr):
    """The entry of each row of `x [.., H]` where `mine [.., H]`, exactly: a sum of one term and zeros."""
    if WARP:  # a row lies in a whole warp: to add integers is one instruction
        kind: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
        return tl.sum(tl.where(mine, x.to(kind, bitcast=True), 0), 1).to(x.dtype, bitcast=True)
    else:  # in few threads: the compiler would put integers into slow local memory
        return tl.sum(tl.where(mine, x, 0.0), 1)


@triton.jit
def greedy(scores, squared_norm, gram, H: tl.constexpr, COPIES: tl.constexpr = 1, UNROLL: tl.constexpr = 1):
    """`bpc_calib.method.encoding.encode_gram` of one block: the same sums in the same order, so the same bits.

    `COPIES` of a row of `gram` are read, 1 or the tokens of the block: the copies lay out all tensors of the pass.
    Returns both words of the codes, int64, squared errors and products `<k, u P>`, `[BLOCK]` each.
    """
    bit = tl.arange(0, H)
    copy = tl.arange(0, COPIES) * 0
    running = scores
    squared_error = squared_norm
    product = tl.zeros_like(squared_norm)
    low = tl.zeros_like(squared_norm).to(tl.int64)  # bits 0 to 63 of the codes
    high = low  # the others
    for i in tl.range(0, H, loop_unroll_factor=UNROLL):
        mine = (bit == i)[None, :]
        t = only(mine, running, COPIES > 1)
        u = tl.where(t >= 0, 1.0, -1.0).to(scores.dtype)  # sign(0) = +1
        along = tl.load(gram + i * H + bit[None, :] + copy[:, None])
        squared_error = squared_error - (2 * tl.abs(t) - tl.load(gram + i * H + i))
        product = product + u * only(mine, scores, COPIES > 1)
        running = running - u[:, None] * tl.where(bit[None, :] > i, along, 0.0)
        positive = (t >= 0).to(tl.int64) << (i % 64)
        low |= tl.where(i < 64, positive, 0)
        if H > 64:
            high |= tl.where(i < 64, 0, positive)
    return low, high, squared_error, product


@triton.jit
def finish(low, high, squared_error, product, squared_norm, codes, error, gain, inside, H: tl.constexpr):
    """Writes code, error and gain byte of each token to its pointers; `error` and `gain` may be None."""
    tl.store(codes, low, mask=inside)
    if H > 64:
        tl.store(codes + 1, high, mask=inside)
    if error is not None:
        squared_error = tl.maximum(squared_error, 0.0)
        root = tl.sqrt(squared_error) if squared_error.dtype == tl.float64 else tl.sqrt_rn(squared_error)
        tl.store(error, root.to(tl.float32), mask=inside)
    if gain is not None:
        positive = product > 0
        ratio = divide(squared_norm * GAIN_UNIT, tl.where(positive, product, 1.0)) - GAIN_OFFSET
        byte = round_even(tl.minimum(tl.maximum(ratio, 0.0), GAIN_MAX))  # within bounds first: rounding keeps them
        byte = tl.where(positive, byte, GAIN_MAX)
        byte = tl.where(squared_norm > 0, byte, GAIN_ONE)
        tl.store(gain, byte.to(tl.int32).to(tl.uint8), mask=inside)


@triton.jit
def deliver(
    low, high, squared_error, product, squared_norm, codes: Strided, error: Strided, gain: Strided, slots, at, n,
    shape: tl.constexpr,
):  # fmt: skip
    """Writes what was found of the tokens `at` of a row: to their slots, or without slots in order."""
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    inside = at < n
    place = at.to(tl.int64)
    if slots is not None:
        place = tl.load(slots + at, mask=inside, other=-1).to(tl.int64)
        inside = place >= 0
        if shape.PAGE:
            b = place // shape.PAGE
            place = place % shape.PAGE
    of_codes = codes.at + b * codes.b + h * codes.h + place * codes.n
    of_error = error.at
    if of_error is not None:
        of_error += b * error.b + h * error.h + place * error.n
    of_gain = gain.at
    if of_gain is not None:
        of_gain += b * gain.b + h * gain.h + place * gain.n
    finish(low, high, squared_error, product, squared_norm, of_codes, of_error, of_gain, inside, shape.H)


@triton.jit
def part_of(keys, mean, at, n, first, keys_n, D: tl.constexpr, PART: tl.constexpr):
    """Columns `first` to `first + PART` of the keys, and of the keys less the mean in float32 (float64)."""
    d = first + tl.arange(0, PART)
    key = tl.load(
        keys + at.to(tl.int64)[:, None] * keys_n + d[None, :], mask=(at[:, None] < n) & (d[None, :] < D), other=0
    )
    wide = key.to(tl.float64) if key.dtype == tl.float64 else key.to(tl.float32)
    if mean is not None:
        wide = wide - tl.load(mean + d, mask=d < D, other=0)[None, :]
    return key, wide


@triton.jit
def by_first(x):
    """Whether this is the first of the programs that share keys, in the shape of `x`."""
    return tl.zeros_like(x) + tl.program_id(2) == 0


@triton.jit
def keep(products: Products, scores, squared_norm, of_key, r, inside, R: tl.constexpr):
    """Writes products with the rows `r`, and from the first program of a key its squared norm."""
    tl.store(products.scores + of_key[:, None] * R + r[None, :], scores, mask=inside[:, None])
    tl.store(products.squared_norm + of_key, squared_norm, mask=inside & by_first(of_key))


@triton.jit(do_not_specialize=["n"])
def encode_kernel(
    keys: Strided,
    encoder: Hashing,
    products: Products,
    codes: Strided,
    error: Strided,
    gain: Strided,
    slots,
    n,
    shape: tl.constexpr,
):
    """Codes of keys `[B, H_KV, n, D]`, or with `products` these: grid (blocks of keys, rows, parts of the products).

    With `slots [n]` those of token `i` go to slot `slots[i]`, of pages in place `slots[i] % PAGE` of page
    `slots[i] // PAGE`; none below 0.

    Products are taken `PART` dimensions at a time: all of them would not fit the registers.
    """
    H: tl.constexpr = shape.H
    COLUMNS: tl.constexpr = shape.COLUMNS
    D: tl.constexpr = shape.D
    PART: tl.constexpr = shape.PART
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    measured = tl.where(tl.program_id(2) == 0, D, 0)  # the first of the programs that share keys measures them
    own_keys = keys.at + b * keys.b + h * keys.h
    own = b * encoder.b + h
    mean = encoder.mean
    if mean is not None:
        mean += own * D
    wide = encoder.gram.dtype.element_ty
    scores = tl.zeros([BLOCK, COLUMNS], wide)
    shift = tl.zeros([COLUMNS], wide)  # the mean projected
    squared_norm = tl.zeros([BLOCK], wide)
    for first in range(0, D, PART):
        key, centred = part_of(own_keys, mean, at, n, first, keys.n, D, PART)
        d = first + tl.arange(0, PART)
        P = tl.load(encoder.matrix + own * (D * shape.R) + r[None, :] * D + d[:, None], mask=d[:, None] < D, other=0)
        scores += dot(key, P.to(key.dtype))  # the matrix was rounded to the dtype of the keys: this rounds nothing
        if mean is not None:
            shift += tl.sum(P * tl.load(mean + d, mask=d < D, other=0)[:, None], 0)
        along = centred
        if encoder.metric is not None:
            along = tl.zeros([BLOCK, PART], wide)
            for second in range(0, measured, PART):
                _, other = part_of(own_keys, mean, at, n, second, keys.n, D, PART)
                e = second + tl.arange(0, PART)
                M = tl.load(
                    encoder.metric + own * (D * D) + e[:, None] * D + d[None, :],
                    mask=(e[:, None] < D) & (d[None, :] < D),
                    other=0,
                )
                along += dot(other, M)
        squared_norm += tl.sum(centred * along, 1)
    if mean is not None:
        scores = scores - shift[None, :]
    if products.scores is not None:
        keep(products, scores, squared_norm, row.to(tl.int64) * n + at, r, at < n, shape.R)
    else:
        low, high, squared_error, product = greedy(scores, squared_norm, encoder.gram + own * (H * H), H)
        deliver(low, high, squared_error, product, squared_norm, codes, error, gain, slots, at, n, shape)


@triton.jit(do_not_specialize=["n"])
def greedy_kernel(scores, squared_norm, gram, codes, error, gain, n, gram_r, H: tl.constexpr, BLOCK: tl.constexpr):
    """The greedy pass alone, from products `[rows, n, H]` and norms `[rows, n]`: tests compare it bit for bit."""
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, H)
    to = row.to(tl.int64) * n
    S = tl.load(scores + (to + at[:, None]) * H + bit[None, :], mask=at[:, None] < n, other=0)
    norm = tl.load(squared_norm + to + at, mask=at < n, other=0)
    low, high, squared_error, product = greedy(S, norm, gram + row.to(tl.int64) * gram_r, H)
    W: tl.constexpr = (H + 63) // 64
    to += at
    finish(low, high, squared_error, product, norm, codes + to * W, error + to, gain + to, at < n, H)
