"""What numba lacks: addresses, numbers of 16 bits, sums of rows, prefetching, counting bits.

A kernel takes addresses and strides (in elements), as those on a GPU do, so that it is compiled once per dtype
whatever the layout. The element type of keys is that of the empty array `like` it is given first: uint16 stands for
bfloat16, int16 for float16.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpc_calib.backends.cpu.compiling import inlined

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "WIDE",
    "add_four",
    "at",
    "at_least",
    "dot_four",
    "element_size",
    "float_of",
    "lowest",
    "ones",
    "prefetch",
    "prefetch_row",
    "splat",
    "vector_at",
    "widen",
    "widen_row",
    "widened",
]

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
WIDE = 16  # float32 of a vector; two registers where they are shorter
FLOATS = ir.VectorType(F32, WIDE)


@intrinsic
def _pointer(context, address):
    def build(context, builder, signature, values):
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), build


@numba.njit(inline="always")
def at(address, length, like):
    """A contiguous array of `length` elements of the dtype of `like`.

    No kernel may use an overload that is inlined: numba then removes dead code, and takes what is written to an array
    that nobody returns for dead.
    """
    return numba.carray(_pointer(address), (length,), like.dtype)


def _prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), I32(0), I32(3), I32(1)])


@intrinsic
def prefetch(context, address):
    """Fetch the cache line at an address ahead of use; no address is an error."""

    def build(context, builder, signature, values):
        _prefetch(builder, values[0])
        return context.get_dummy_value()

    return types.void(types.intp), build


@intrinsic
def prefetch_row(context, address, size):
    """Fetch all cache lines of a row of so many bytes ahead of use; up to 4 without a loop, which would be slower."""

    def build(context, builder, signature, values):
        address, size = values
        last = builder.sub(size, I64(1))
        for begin in map(I64, (0, 64, 128, 192)):
            _prefetch(builder, builder.add(address, builder.select(builder.icmp_signed("<", begin, last), begin, last)))
        with builder.if_then(builder.icmp_signed(">=", last, I64(256)), likely=False):
            with cgutils.for_range_slice(builder, I64(256), size, I64(64), I64) as (begin, _):
                _prefetch(builder, builder.add(address, begin))
            _prefetch(builder, builder.add(address, last))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), build


@intrinsic
def float_of(context, bits):
    """The float32 that an int32 has the bits of."""

    def build(context, builder, signature, values):
        return builder.bitcast(values[0], F32)

    return types.float32(types.int32), build


@intrinsic
def widen(context, number):
    """float32 of an element of a cache: float32 itself, bfloat16 as uint16, float16 as int16."""

    def build(context, builder, signature, values):
        if number == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(values[0], I32), I32(16)), F32)
        if number == types.int16:
            return builder.fpext(builder.bitcast(values[0], ir.HalfType()), F32)
        return values[0]

    return types.float32(number), build


def vector_at(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def splat(builder: Any, number: Any, count: int) -> Any:
    kind = ir.VectorType(number.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), [0] * count))


def _float_at(builder: Any, address: Any, place: Any) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, builder.mul(place, I64(4))), F32.as_pointer()))


def widened(builder: Any, address: Any, dtype: Any) -> Any:
    """What `widen` makes of the next `WIDE` numbers."""
    if dtype == types.float32:
        return vector_at(builder, address, FLOATS)
    raw = vector_at(builder, address, ir.VectorType(I16, WIDE))
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), WIDE)), FLOATS)
    wide = ir.VectorType(I32, WIDE)
    return builder.bitcast(builder.shl(builder.zext(raw, wide), ir.Constant(wide, [16] * WIDE)), FLOATS)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDE}f32")
    return builder.call(function, [a, b, c])


@intrinsic
def dot_four(context, like, row, query, dim, out, stride):
    """Products of a row, like `like`, with float32 `[4, dim]`, to float32 `[4, stride]`: of whole `WIDE`s of `dim`."""

    def build(context, builder, signature, values):
        _, row, queries, dim, out, stride = values
        sums = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * WIDE)) for _ in range(4)]
        with cgutils.for_range(builder, builder.udiv(dim, I64(WIDE))) as loop:
            first = builder.mul(loop.index, I64(WIDE))
            place = builder.add(row, builder.mul(first, I64(signature.args[0].dtype.bitwidth // 8)))
            numbers = widened(builder, place, signature.args[0].dtype)
            for head, total in enumerate(sums):
                begin = builder.add(first, builder.mul(dim, I64(head)))
                query = vector_at(builder, builder.add(queries, builder.mul(begin, I64(4))), FLOATS)
                builder.store(_multiply_add(builder, query, numbers, builder.load(total)), total)
        kind = ir.FunctionType(F32, [F32, FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{WIDE}f32")
        for head, total in enumerate(sums):
            product = builder.call(function, [F32(0.0), builder.load(total)], fastmath=("reassoc",))
            place = builder.add(out, builder.mul(stride, I64(4 * head)))
            builder.store(product, builder.inttoptr(place, F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(like, *[types.intp] * 5), build


@intrinsic
def add_four(context, like, one, two, three, four, weights, stride, sums, dim):
    """Add 4 rows, like `like`, weighted by float32 `[4, stride]`, to float32 `[4, dim]`: whole `WIDE`s of `dim`."""

    def build(context, builder, signature, values):
        rows, weights, stride, sums, dim = values[1:5], *values[5:]
        spread = [
            [
                splat(builder, _float_at(builder, weights, builder.add(builder.mul(stride, I64(head)), I64(i))), WIDE)
                for i in range(4)
            ]
            for head in range(4)
        ]
        with cgutils.for_range(builder, builder.udiv(dim, I64(WIDE))) as loop:
            first = builder.mul(loop.index, I64(WIDE))
            along = builder.mul(first, I64(signature.args[0].dtype.bitwidth // 8))
            numbers = [widened(builder, builder.add(row, along), signature.args[0].dtype) for row in rows]
            for head in range(4):
                place = builder.add(sums, builder.mul(builder.add(first, builder.mul(dim, I64(head))), I64(4)))
                total = vector_at(builder, place, FLOATS)
                for i in range(4):
                    total = _multiply_add(builder, spread[head][i], numbers[i], total)
                builder.store(total, builder.inttoptr(place, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(like, *[types.intp] * 8), build


@intrinsic
def at_least(context, address, least):
    """A bit for each of the 64 int32 at an address: whether it is at least `least`."""

    def build(context, builder, signature, values):
        numbers = vector_at(builder, values[0], ir.VectorType(I32, 64))
        return builder.bitcast(builder.icmp_signed(">=", numbers, splat(builder, values[1], 64)), I64)

    return types.uint64(types.intp, types.int32), build


@intrinsic
def ones(context, bits):
    """How many bits of an uint64 are 1."""

    def build(context, builder, signature, values):
        return builder.ctpop(values[0])

    return types.int64(types.uint64), build


@intrinsic
def lowest(context, bits):
    """The place of the lowest bit of an uint64 that is 1; 64 for 0."""

    def build(context, builder, signature, values):
        return builder.cttz(values[0], I1(0))

    return types.uint64(types.uint64), build


BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2

LIKE_F32, LIKE_U16, LIKE_I16 = (np.empty(0, kind) for kind in (np.float32, np.uint16, np.int16))


@inlined
def element_size(element):
    """Bytes of an element."""
    return 4 if element == FLOAT32 else 2


@inlined
def from_half(number):
    """float32 of a float16 as int16, by its bits: LLVM's conversion needs a function where a CPU has no instruction."""
    bits = np.int32(number)
    wide = np.int32(bits & 0x7FFF) << np.int32(13)  # exponent and fraction in their places, the exponent 112 too small
    positive = float_of(np.int32(wide)) * np.float32(2.0**112)
    if wide >= 0x0F800000:  # infinity and NaN
        positive = float_of(np.int32(wide | 0x7F800000))
    return -positive if bits < 0 else positive


@inlined
def widen_row(address, element, out):
    """Write the contiguous row at an address to the float32 `out`, which has its length."""
    if element == FLOAT32:
        out[:] = at(address, len(out), LIKE_F32)
    elif element == BFLOAT16:
        bfloat = at(address, len(out), LIKE_U16)
        for i in range(len(out)):
            out[i] = widen(bfloat[i])
    else:
        half = at(address, len(out), LIKE_I16)
        for i in range(len(out)):
            out[i] = from_half(half[i])
