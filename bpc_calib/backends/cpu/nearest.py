"""Hashing with product codes: the nearest centroid of every part of a key, in the order of sums of `encode_parts`."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.constants import CENTROIDS
from bpc_calib.backends.cpu.gain import error_of, gain_of
from bpc_calib.backends.cpu.language import WIDE, at, splat, vector_at

__all__ = ["SHARE", "find_parts", "parts_kernel"]

TOGETHER = 4  # vectors of sums at once: they stay in registers of every machine
SHARE = 64  # keys of a task

F32, I64, U8 = np.empty(0, np.float32), np.empty(0, np.int64), np.empty(0, np.uint8)
FLOAT, I32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTEGERS = ir.VectorType(FLOAT, WIDE), ir.VectorType(I32, WIDE)


def _after(builder: Any, address: Any, place: Any) -> Any:
    return builder.add(address, builder.mul(place, INT64(4)))


@intrinsic
def nearest(context, key, along, halves, width, best):
    """The number of the centroid with the largest `<z, c> - |c|^2 / 2`, which goes to the address `best`.

    Addresses of float32: `key` `[width]`, `along` `[width, 256]`, `halves` `[256]`. No product is fused with a sum.
    """

    def build(context, builder, signature, values):
        key, along, halves, width, best = values
        top, where = ir.Constant(FLOATS, [float("-inf")] * WIDE), ir.Constant(INTEGERS, [0] * WIDE)
        for block in range(0, CENTROIDS // WIDE, TOGETHER):
            sums = []
            for v in range(TOGETHER):
                half = vector_at(builder, _after(builder, halves, INT64((block + v) * WIDE)), FLOATS, 4)
                sums.append(cgutils.alloca_once_value(builder, builder.fneg(half)))
            with cgutils.for_range(builder, width) as loop:
                place = builder.inttoptr(_after(builder, key, loop.index), FLOAT.as_pointer())
                number = splat(builder, builder.load(place), WIDE)
                row = _after(builder, along, builder.mul(loop.index, INT64(CENTROIDS)))
                for v, total in enumerate(sums):
                    other = vector_at(builder, _after(builder, row, INT64((block + v) * WIDE)), FLOATS, 4)
                    builder.store(builder.fadd(builder.load(total), builder.fmul(number, other)), total)
            for v, total in enumerate(sums):
                found = builder.load(total)
                better = builder.fcmp_ordered(">", found, top)  # the first of equal ones stays
                first = (block + v) * WIDE
                numbers = ir.Constant(INTEGERS, list(range(first, first + WIDE)))
                top, where = builder.select(better, found, top), builder.select(better, numbers, where)
        step = WIDE // 2
        while step:
            turn = ir.Constant(INTEGERS, [(lane + step) % WIDE for lane in range(WIDE)])
            other, number = (builder.shuffle_vector(each, each, turn) for each in (top, where))
            equal = builder.and_(builder.fcmp_ordered("==", other, top), builder.icmp_signed("<", number, where))
            better = builder.or_(builder.fcmp_ordered(">", other, top), equal)
            top, where = builder.select(better, other, top), builder.select(better, number, where)
            step //= 2
        builder.store(builder.extract_element(top, I32(0)), builder.inttoptr(best, FLOAT.as_pointer()))
        return builder.zext(builder.extract_element(where, I32(0)), INT64)

    return types.int64(*[types.intp] * 5), build


@inlined
def find_parts(rotated, count, dim, parts, along, halves, codes, errors, gains):
    """`encode_parts` of float32 `[count, dim]`, for `along` `[parts, dim / parts, 256]` and `halves` `[parts, 256]`."""
    words, width = (parts + 7) // 8, dim // parts
    best = np.empty(1, np.float32)
    for x in range(count):
        key = at(rotated + 4 * x * dim, dim, F32)
        code = at(codes + 8 * x * words, words, I64)
        code[:] = 0
        norm = np.float32(0)
        for d in range(dim):
            norm += key[d] * key[d]
        left, dot = norm, np.float32(0)
        for j in range(parts):
            begin = 4 * CENTROIDS * j
            place = nearest(
                rotated + 4 * (x * dim + j * width), along + begin * width, halves + begin, width, best.ctypes.data
            )
            code[j // 8] |= place << (8 * (j % 8))
            gained = best[0]
            left -= np.float32(2) * gained
            dot += gained + at(halves + begin + 4 * place, 1, F32)[0]
        at(errors + 4 * x, 1, F32)[0] = error_of(left)
        at(gains + x, 1, U8)[0] = gain_of(norm, dot)


@inlined
def share_of_row(task, shares, rotated, tokens, dim, parts, along, halves, codes, errors, gains):
    """One of the `shares` of a row; all rows have their own centroids."""
    row, first = task // shares, task % shares * SHARE
    count, begin, words = min(SHARE, tokens - first), row * tokens + first, (parts + 7) // 8
    find_parts(
        rotated + 4 * begin * dim, count, dim, parts, along[row], halves[row], codes + 8 * begin * words,
        errors + 4 * begin, gains + begin,
    )  # fmt: skip


@compiled(parallel=True)
def parts_kernel(rotated, rows, tokens, dim, parts, along, halves, codes, errors, gains):
    """`find_parts` of float32 `[rows, tokens, dim]`; `along` and `halves` hold an address for each row, int64."""
    shares = (tokens + SHARE - 1) // SHARE
    for index in numba.prange(rows * shares):
        share_of_row(np.int64(index), shares, rotated, tokens, dim, parts, along, halves, codes, errors, gains)
