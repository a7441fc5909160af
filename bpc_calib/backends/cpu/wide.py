"""float64 vectors for fitting projections: products and sums of rows of keys, and a block of a matrix product.

`like` is an empty array of the keys' element type (see `language`), and a `dim` is a multiple of `WIDE`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpc_calib.backends.cpu.language import WIDE, splat, vector_at, widened

__all__ = ["HEIGHT", "add_row", "dot_row", "dot_rows", "tile"]

HEIGHT = 8  # rows of a tile: with WIDE columns each they fill sixteen registers of 512 bits

I32, I64, F32, F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
FLOATS, DOUBLES = ir.VectorType(F32, WIDE), ir.VectorType(F64, WIDE)


def _exact(builder: Any, address: Any, dtype: Any) -> Any:
    """The next `WIDE` numbers of a row in float64."""
    return builder.fpext(widened(builder, address, dtype), DOUBLES)


def _numbers(builder: Any, address: Any) -> Any:
    return vector_at(builder, address, DOUBLES, 8)


def _after(builder: Any, address: Any, count: Any, size: int) -> Any:
    return builder.add(address, builder.mul(count, I64(size)))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    bits = 32 if a.type == FLOATS else 64
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDE}f{bits}")
    return builder.call(function, [a, b, c])


@intrinsic
def dot_row(context, like, row, numbers, dim):
    """The product, float64, of a row at an address and float64 `[dim]` at another."""

    def build(context, builder, signature, values):
        _, row, numbers, dim = values
        dtype = signature.args[0].dtype
        total = cgutils.alloca_once_value(builder, ir.Constant(DOUBLES, [0.0] * WIDE))
        with cgutils.for_range_slice(builder, I64(0), dim, I64(WIDE), I64) as (first, _):
            left = _exact(builder, _after(builder, row, first, dtype.bitwidth // 8), dtype)
            right = _numbers(builder, _after(builder, numbers, first, 8))
            builder.store(_multiply_add(builder, left, right, builder.load(total)), total)
        kind = ir.FunctionType(F64, [F64, DOUBLES])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{WIDE}f64")
        return builder.call(function, [F64(0.0), builder.load(total)], fastmath=("reassoc",))

    return types.float64(like, *[types.intp] * 3), build


def _halves(builder: Any, one: Any, two: Any) -> Any:
    """Sums of neighbouring numbers of two vectors as one vector: in each block of four, two of `one`, two of `two`."""
    count = one.type.count
    even = [i + side * count for block in range(0, count, 4) for side in (0, 1) for i in (block, block + 2)]
    places = [ir.Constant(ir.VectorType(I32, count), [place + odd for place in even]) for odd in (0, 1)]
    return builder.fadd(*(builder.shuffle_vector(one, two, each) for each in places))


@intrinsic
def dot_rows(context, like, rows, numbers, dim, out):
    """Products of 4 rows, `dim` numbers apart, with float32 `[dim]`, to float32 `[4]` at an address."""

    def build(context, builder, signature, values):
        _, rows, numbers, dim, out = values
        dtype = signature.args[0].dtype
        size = dtype.bitwidth // 8
        starts = [_after(builder, rows, builder.mul(dim, I64(i)), size) for i in range(4)]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * WIDE)) for _ in range(4)]
        with cgutils.for_range_slice(builder, I64(0), dim, I64(WIDE), I64) as (first, _):
            right = vector_at(builder, _after(builder, numbers, first, 4), FLOATS, 4)
            for start, total in zip(starts, sums, strict=True):
                left = widened(builder, _after(builder, start, first, size), dtype)
                builder.store(_multiply_add(builder, left, right, builder.load(total)), total)
        one, two, three, four = map(builder.load, sums)
        parts = _halves(builder, _halves(builder, one, two), _halves(builder, three, four))  # 4 blocks of 4 sums
        blocks = [
            builder.shuffle_vector(parts, parts, ir.Constant(ir.VectorType(I32, 4), list(range(i, i + 4))))
            for i in range(0, WIDE, 4)
        ]
        whole = builder.fadd(builder.fadd(blocks[0], blocks[1]), builder.fadd(blocks[2], blocks[3]))
        builder.store(whole, builder.inttoptr(out, whole.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(like, *[types.intp] * 4), build


@intrinsic
def add_row(context, like, row, factor, sums, dim):
    """Add a row, times a factor, to float64 `[dim]` at an address."""

    def build(context, builder, signature, values):
        _, row, factor, sums, dim = values
        dtype = signature.args[0].dtype
        factors = splat(builder, factor, WIDE)
        with cgutils.for_range_slice(builder, I64(0), dim, I64(WIDE), I64) as (first, _):
            left = _exact(builder, _after(builder, row, first, dtype.bitwidth // 8), dtype)
            place = _after(builder, sums, first, 8)
            total = _multiply_add(builder, left, factors, _numbers(builder, place))
            builder.store(total, builder.inttoptr(place, DOUBLES.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(like, types.intp, types.float64, types.intp, types.intp), build


@intrinsic
def tile(context, a, a_step, a_next, b, b_step, count, c, c_next):
    """Add a product to `HEIGHT` rows of `WIDE` float64: `c[i, j] += sum over n < count of a[n, i] b[n, j]`, in order.

    Addresses, and strides in elements: `_step` along `n`, `_next` along `i`; `j` is contiguous.
    """

    def build(context, builder, signature, values):
        a, a_step, a_next, b, b_step, count, c, c_next = values
        places = [_after(builder, c, builder.mul(c_next, I64(i)), 8) for i in range(HEIGHT)]
        sums = [cgutils.alloca_once_value(builder, _numbers(builder, place)) for place in places]
        with cgutils.for_range(builder, count) as loop:
            right = _numbers(builder, _after(builder, b, builder.mul(loop.index, b_step), 8))
            row = _after(builder, a, builder.mul(loop.index, a_step), 8)
            for i, total in enumerate(sums):
                place = _after(builder, row, builder.mul(a_next, I64(i)), 8)
                left = splat(builder, builder.load(builder.inttoptr(place, F64.as_pointer()), align=8), WIDE)
                builder.store(_multiply_add(builder, left, right, builder.load(total)), total)
        for place, total in zip(places, sums, strict=True):
            builder.store(builder.load(total), builder.inttoptr(place, DOUBLES.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8), build
