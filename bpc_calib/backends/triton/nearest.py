"""Hashing of keys with product codes: a rotation, then the nearest centroid of every part, in registers."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.append import centred, loaded, stored
from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.constants import CENTROIDS
from bpc_calib.backends.triton.encode import deliver, finish, only, part_of
from bpc_calib.backends.triton.language import dot

__all__ = [
    "EncodePartsShape", "Finding", "OneShape", "append_parts_kernel", "encode_few_kernel", "encode_parts_kernel",
]  # fmt: skip

AT_ONCE = tl.constexpr(128)  # centroids of a block of keys whose scores are in registers
BLOCK_UNROLL = tl.constexpr(2)  # dimensions of a part whose centroids are loaded at once, for a block of keys
ONE_UNROLL = tl.constexpr(4)  # the same for one key
IN_ORDER = tl.constexpr(32)  # numbers of a sum in order that are loaded at once


class Finding(NamedTuple):
    """What product codes are found with: the tensors of a `ProductEncoder`, contiguous, with the centroids transposed.

    `M` parts of `D / M` dimensions each.
    """

    matrix: Any  # [.., D, D]
    centroids: Any  # [.., M, D / M, 256]
    halves: Any  # [.., M, 256]
    mean: Any  # [.., D] or None
    b: int  # 0 where all sequences share the projections, H_KV where each has its own


class EncodePartsShape(NamedTuple):
    """Constants of a kernel compiled for blocks of keys; `_UP` is rounded up to a power of two."""

    H_KV: int
    H: int  # bits of a code
    D: int
    M: int
    WIDTH: int  # dimensions of a part
    WIDTH_UP: int
    PART: int  # dimensions of the keys at a time
    BLOCK: int
    PAGE: int  # tokens of a page; 0: codes and gains are written in order


class OneShape(NamedTuple):
    """Constants of a kernel compiled for one key at a time; `_UP` is rounded up to a power of two."""

    H_KV: int
    H: int  # bits of a code
    D: int
    D_UP: int
    M: int
    WIDTH: int  # dimensions of a part
    ROWS: int  # rows of the matrix at a time
    V: int = 0  # dimensions of a value
    V_UP: int = 0
    PAGE: int = 0  # tokens of a page; 0: codes and gains are written in order


@triton.jit(do_not_specialize=["n"])
def encode_parts_kernel(
    keys: Strided,
    encoder: Finding,
    codes: Strided,
    error,
    gain: Strided,
    slots,
    n,
    shape: tl.constexpr,
):
    """Product codes of keys `[B, H_KV, n, D]`, written as `encode_kernel` does: grid (blocks of keys, rows).

    The sums have the order of `bpc_calib.method.product.encode_parts`: the same bits from the same rotated keys.
    """
    H_KV: tl.constexpr = shape.H_KV
    PART: tl.constexpr = shape.PART
    D: tl.constexpr = shape.D
    M: tl.constexpr = shape.M
    WIDTH: tl.constexpr = shape.WIDTH
    WIDTH_UP: tl.constexpr = shape.WIDTH_UP
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    b = (row // H_KV).to(tl.int64)
    h = (row % H_KV).to(tl.int64)
    own = b * encoder.b + h
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own_keys = keys.at + b * keys.b + h * keys.h
    mean = encoder.mean
    if mean is not None:
        mean += own * D
    i = tl.arange(0, WIDTH_UP)
    part = tl.arange(0, M)
    wide = encoder.halves.dtype.element_ty
    squared_norm = tl.zeros([BLOCK], wide)
    product = tl.zeros([BLOCK], wide)
    fell = tl.zeros([BLOCK, M], wide)  # by how much each part lowers half the squared error
    low = tl.zeros([BLOCK], tl.int64)  # parts 0 to 7 of the codes
    high = low  # the others
    for j in range(M):
        rotated = tl.zeros([BLOCK, WIDTH_UP], wide)
        for first in range(0, D, PART):
            _, less_mean = part_of(own_keys, mean, at, n, first, keys.n, D, PART)
            d = first + tl.arange(0, PART)
            R = tl.load(
                encoder.matrix + (own * D + d[:, None]) * D + j * WIDTH + i[None, :],
                mask=(d[:, None] < D) & (i[None, :] < WIDTH),
                other=0,
            )
            rotated += dot(less_mean, R)
        halves = encoder.halves + (own * M + j) * CENTROIDS
        centroids = encoder.centroids + (own * D + j * WIDTH) * CENTROIDS
        best = tl.full([BLOCK], float("-inf"), wide)
        place = tl.zeros([BLOCK], tl.int32)
        for few in tl.static_range(0, CENTROIDS, AT_ONCE):
            c = few + tl.arange(0, AT_ONCE)
            scores = tl.zeros([BLOCK, AT_ONCE], wide) - tl.load(halves + c)[None, :]
            for each in tl.range(0, WIDTH, loop_unroll_factor=BLOCK_UNROLL):
                number = only(i == each, rotated, False)
                scores = scores + number[:, None] * tl.load(centroids + each * CENTROIDS + c)[None, :]
                if few == 0:
                    squared_norm = squared_norm + number * number
            largest, where = tl.max(scores, 1, return_indices=True)  # the lowest place of equal ones
            better = largest > best
            best = tl.where(better, largest, best)
            place = tl.where(better, where + few, place)
        product = product + (best + tl.load(halves + place))
        fell = tl.where(part[None, :] == j, best[:, None], fell)
        byte = place.to(tl.int64) << (8 * (j % 8))
        low |= tl.where(j < 8, byte, 0)
        if M > 8:
            high |= tl.where(j < 8, 0, byte)
    squared_error = squared_norm
    for j in tl.static_range(M):
        squared_error = squared_error - 2 * only(part == j, fell, False)
    deliver(low, high, squared_error, product, squared_norm, codes, error, gain, slots, at, n, shape)


@triton.jit
def find_parts(key, encoder: Finding, own, scratch, shape: tl.constexpr):
    """Of one key, all parts at once: both words of its code, squared error, product `<k, code>`, norm; `[1]` each.

    Sums in order read their numbers from `scratch [D + 2 M]`, where every thread finds them.
    """
    D: tl.constexpr = shape.D
    D_UP: tl.constexpr = shape.D_UP
    M: tl.constexpr = shape.M
    WIDTH: tl.constexpr = shape.WIDTH
    ROWS: tl.constexpr = shape.ROWS
    wide = encoder.halves.dtype.element_ty
    mean = encoder.mean
    if mean is not None:
        mean += own * D
    d = tl.arange(0, D_UP)
    products = tl.zeros([ROWS, D_UP], wide)
    for first in tl.static_range(0, D, ROWS):
        e = first + tl.arange(0, ROWS)
        R = tl.load(
            encoder.matrix + (own * D + e[:, None]) * D + d[None, :], mask=(e[:, None] < D) & (d[None, :] < D), other=0
        )
        products += R * centred(key, mean, e, D)[:, None]
    tl.store(scratch + d, tl.sum(products, 0), mask=d < D)
    tl.debug_barrier()  # until all warps have written

    part = tl.arange(0, M)
    c = tl.arange(0, CENTROIDS)
    halves = encoder.halves + own * (M * CENTROIDS) + part * CENTROIDS
    centroids = encoder.centroids + own * (D * CENTROIDS) + part[:, None] * (WIDTH * CENTROIDS) + c[None, :]
    scores = tl.zeros([M, CENTROIDS], wide) - tl.load(halves[:, None] + c[None, :])
    for each in tl.range(0, WIDTH, loop_unroll_factor=ONE_UNROLL):
        number = tl.load(scratch + part * WIDTH + each)
        scores = scores + number[:, None] * tl.load(centroids + each * CENTROIDS)
    best, place = tl.max(scores, 1, return_indices=True)  # the lowest place of equal ones
    tl.store(scratch + D + part, best)
    tl.store(scratch + D + M + part, best + tl.load(halves + place))
    tl.debug_barrier()

    squared_norm = tl.zeros([1], wide)
    for each in tl.range(0, D, loop_unroll_factor=IN_ORDER):
        number = tl.load(scratch + each)
        squared_norm = squared_norm + number * number
    squared_error = squared_norm
    product = tl.zeros([1], wide)
    for j in tl.static_range(M):
        squared_error = squared_error - 2 * tl.load(scratch + D + j)
        product = product + tl.load(scratch + D + M + j)
    byte = place.to(tl.int64) << (8 * (part % 8)).to(tl.int64)
    nothing = tl.zeros([1], tl.int64)
    low = nothing + tl.sum(tl.where(part < 8, byte, 0), 0)
    high = nothing + tl.sum(tl.where(part < 8, 0, byte), 0)
    return low, high, squared_error, product, squared_norm


@triton.jit(do_not_specialize=["n"])
def encode_few_kernel(
    keys: Strided,
    encoder: Finding,
    codes: Strided,
    error,
    gain: Strided,
    slots,
    n,
    scratch,
    shape: tl.constexpr,
):
    """Does what `encode_parts_kernel` does, with `scratch [rows, n, D + 2 M]`. Grid (keys, rows)."""
    D: tl.constexpr = shape.D
    H_KV: tl.constexpr = shape.H_KV
    M: tl.constexpr = shape.M
    row = tl.program_id(1)
    b = (row // H_KV).to(tl.int64)
    h = (row % H_KV).to(tl.int64)
    at = tl.program_id(0)
    key = keys.at + b * keys.b + h * keys.h + at.to(tl.int64) * keys.n
    own_scratch = scratch + (row.to(tl.int64) * n + at) * (D + 2 * M)
    low, high, squared_error, product, squared_norm = find_parts(key, encoder, b * encoder.b + h, own_scratch, shape)
    one = at + tl.arange(0, 1)
    deliver(low, high, squared_error, product, squared_norm, codes, error, gain, slots, one, n, shape)


@triton.jit
def append_parts_kernel(
    key: Strided,
    value: Strided,
    place,
    encoder: Finding,
    keys: Strided,
    values: Strided,
    codes: Strided,
    gain: Strided,
    error: Strided,
    scratch,
    shape: tl.constexpr,
):
    """Does what `append_kernel` does, with product codes and `scratch [rows, D + 2 M]`. Grid (rows)."""
    H: tl.constexpr = shape.H
    H_KV: tl.constexpr = shape.H_KV
    M: tl.constexpr = shape.M
    V: tl.constexpr = shape.V
    V_UP: tl.constexpr = shape.V_UP
    D: tl.constexpr = shape.D
    D_UP: tl.constexpr = shape.D_UP
    row = tl.program_id(0)
    b = (row // H_KV).to(tl.int64)
    h = (row % H_KV).to(tl.int64)
    at = tl.load(place).to(tl.int64)
    stored(loaded(key, b, h, D, D_UP), keys, b, h, at, D, D_UP)
    stored(loaded(value, b, h, V, V_UP), values, b, h, at, V, V_UP)
    own_key = key.at + b * key.b + h * key.h
    own_scratch = scratch + row.to(tl.int64) * (D + 2 * M)
    low, high, squared_error, product, squared_norm = find_parts(
        own_key, encoder, b * encoder.b + h, own_scratch, shape
    )
    one = tl.arange(0, 1)
    own_gain = gain.at
    if own_gain is not None:
        own_gain += b * gain.b + h * gain.h + at * gain.n + one
    own_error = error.at
    if own_error is not None:
        own_error += b * error.b + h * error.h + at * error.n + one
    own_codes = codes.at + b * codes.b + h * codes.h + at * codes.n + one
    finish(low, high, squared_error, product, squared_norm, own_codes, own_error, own_gain, one < 1, H)
