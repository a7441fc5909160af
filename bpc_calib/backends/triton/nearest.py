"""Hashing of keys with product codes: a rotation, then the nearest centroid of every part, in registers."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.append import centred, loaded, stored
from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.constants import CENTROIDS
from bpc_calib.backends.triton.encode import deliver, finish, only, part_of
from bpc_calib.backends.triton.language import dot

__all__ = ["AppendPartsShape", "EncodePartsShape", "Finding", "append_parts_kernel", "encode_parts_kernel"]

UNROLL = tl.constexpr(4)  # dimensions of a part whose centroids are loaded at once
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
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    H: int  # bits of a code
    D: int
    M: int
    WIDTH: int  # dimensions of a part
    WIDTH_UP: int
    PART: int  # dimensions of the keys at a time
    BLOCK: int
    PAGE: int  # tokens of a page; 0: codes and gains are written in order


class AppendPartsShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    D: int
    D_UP: int
    V: int  # dimensions of a value
    V_UP: int
    M: int
    WIDTH: int  # dimensions of a part
    ROWS: int  # rows of the matrix at a time


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
    D: tl.constexpr = shape.D
    M: tl.constexpr = shape.M
    WIDTH: tl.constexpr = shape.WIDTH
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    own = b * encoder.b + h
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own_keys = keys.at + b * keys.b + h * keys.h
    mean = encoder.mean
    if mean is not None:
        mean += own * D
    i = tl.arange(0, shape.WIDTH_UP)
    c = tl.arange(0, CENTROIDS)
    part = tl.arange(0, M)
    wide = encoder.halves.dtype.element_ty
    squared_norm = tl.zeros([BLOCK], wide)
    product = tl.zeros([BLOCK], wide)
    fell = tl.zeros([BLOCK, M], wide)  # by how much each part lowers half the squared error
    low = tl.zeros([BLOCK], tl.int64)  # parts 0 to 7 of the codes
    high = low  # the others
    for j in range(M):
        rotated = tl.zeros([BLOCK, shape.WIDTH_UP], wide)
        for first in range(0, D, shape.PART):
            _, less_mean = part_of(own_keys, mean, at, n, first, keys.n, D, shape.PART)
            d = first + tl.arange(0, shape.PART)
            R = tl.load(
                encoder.matrix + (own * D + d[:, None]) * D + j * WIDTH + i[None, :],
                mask=(d[:, None] < D) & (i[None, :] < WIDTH),
                other=0,
            )
            rotated += dot(less_mean, R)
        halves = encoder.halves + (own * M + j) * CENTROIDS
        scores = tl.zeros([BLOCK, CENTROIDS], wide) - tl.load(halves + c)[None, :]
        for each in tl.range(0, WIDTH, loop_unroll_factor=UNROLL):
            number = only(i == each, rotated, False)
            along = tl.load(encoder.centroids + (own * D + j * WIDTH + each) * CENTROIDS + c)
            scores = scores + number[:, None] * along[None, :]
            squared_norm = squared_norm + number * number
        best, place = tl.max(scores, 1, return_indices=True)  # the lowest place of equal ones
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
def append_parts_kernel(
    key: Strided,
    value: Strided,
    place,
    encoder: Finding,
    scratch,
    keys: Strided,
    values: Strided,
    codes: Strided,
    gain: Strided,
    error: Strided,
    shape: tl.constexpr,
):
    """Does what `append_kernel` does, with product codes, all parts at once. Grid (rows).

    Sums in order read their numbers from `scratch [rows, D + 2 M]`, where every thread finds them.
    """
    D: tl.constexpr = shape.D
    D_UP: tl.constexpr = shape.D_UP
    M: tl.constexpr = shape.M
    WIDTH: tl.constexpr = shape.WIDTH
    row = tl.program_id(0)
    b = (row // shape.H_KV).to(tl.int64)
    h = (row % shape.H_KV).to(tl.int64)
    own = b * encoder.b + h
    slot = tl.load(place).to(tl.int64)
    stored(loaded(key, b, h, D, D_UP), keys, b, h, slot, D, D_UP)
    stored(loaded(value, b, h, shape.V, shape.V_UP), values, b, h, slot, shape.V, shape.V_UP)

    wide = encoder.halves.dtype.element_ty
    mean = encoder.mean
    if mean is not None:
        mean += own * D
    own_key = key.at + b * key.b + h * key.h
    d = tl.arange(0, D_UP)
    products = tl.zeros([shape.ROWS, D_UP], wide)
    for first in tl.static_range(0, D, shape.ROWS):
        e = first + tl.arange(0, shape.ROWS)
        R = tl.load(
            encoder.matrix + (own * D + e[:, None]) * D + d[None, :], mask=(e[:, None] < D) & (d[None, :] < D), other=0
        )
        products += R * centred(own_key, mean, e, D)[:, None]
    rotated = scratch + row.to(tl.int64) * (D + 2 * M)
    tl.store(rotated + d, tl.sum(products, 0), mask=d < D)
    tl.debug_barrier()  # until all warps have written

    part = tl.arange(0, M)
    c = tl.arange(0, CENTROIDS)
    halves = encoder.halves + own * (M * CENTROIDS) + part * CENTROIDS
    centroids = encoder.centroids + own * (D * CENTROIDS) + part[:, None] * (WIDTH * CENTROIDS) + c[None, :]
    scores = tl.zeros([M, CENTROIDS], wide) - tl.load(halves[:, None] + c[None, :])
    for each in tl.range(0, WIDTH, loop_unroll_factor=UNROLL):
        number = tl.load(rotated + part * WIDTH + each)
        scores = scores + number[:, None] * tl.load(centroids + each * CENTROIDS)
    best, centroid = tl.max(scores, 1, return_indices=True)  # the lowest place of equal ones
    tl.store(rotated + D + part, best)
    tl.store(rotated + D + M + part, best + tl.load(halves + centroid))
    tl.debug_barrier()

    squared_norm = tl.zeros([1], wide)
    for each in tl.range(0, D, loop_unroll_factor=IN_ORDER):
        number = tl.load(rotated + each)
        squared_norm = squared_norm + number * number
    squared_error = squared_norm
    product = tl.zeros([1], wide)
    for j in tl.static_range(M):
        squared_error = squared_error - 2 * tl.load(rotated + D + j)
        product = product + tl.load(rotated + D + M + j)
    bytes = centroid.to(tl.int64) << (8 * (part % 8)).to(tl.int64)
    one = tl.arange(0, 1)
    low = tl.sum(tl.where(part < 8, bytes, 0), 0) + one.to(tl.int64)
    high = tl.sum(tl.where(part < 8, 0, bytes), 0) + one.to(tl.int64)
    own_gain = gain.at
    if own_gain is not None:
        own_gain += b * gain.b + h * gain.h + slot * gain.n + one
    own_error = error.at
    if own_error is not None:
        own_error += b * error.b + h * error.h + slot * error.n + one
    own_codes = codes.at + b * codes.b + h * codes.h + slot * codes.n + one
    finish(low, high, squared_error, product, squared_norm, own_codes, own_error, own_gain, one < 1, 8 * M)
