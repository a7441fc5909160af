"""What numba lacks: addresses, numbers of 16 bits, products of bytes, prefetching; and how kernels are compiled here.

A kernel takes addresses and strides (in elements), as those on a GPU do, so that it is compiled once for a dtype
whatever the layout. The element type of keys is that of the empty array `like` it is given first: uint16 stands for
bfloat16, int16 for float16.
"""

import functools
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from bpc_calib.backends.cpu.folder import kept, stamp

__all__ = [
    "AT_ONCE",
    "LANES",
    "WIDE",
    "above",
    "add_four",
    "ask",
    "at",
    "compiled",
    "dot_four",
    "dots_1",
    "dots_2",
    "float_of",
    "inlined",
    "lowest",
    "ones",
    "prefetch",
    "widen",
]

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
WIDE = 16  # float32 of a vector; two registers where they are shorter
FLOATS = ir.VectorType(F32, WIDE)


class _Locator:
    """Where numba is to keep a kernel, and what makes it stale: any change in this package."""

    def __init__(self, function: Any, folder: str) -> None:
        self._py_file = function.__code__.co_filename
        self._lineno = function.__code__.co_firstlineno
        self._folder = folder

    @classmethod
    def from_function(cls, function: Any, file: str) -> "_Locator | None":
        folder = kept()
        return None if folder is None else cls(function, str(folder))

    def get_cache_path(self) -> str:
        return self._folder

    def ensure_cache_path(self) -> None:
        pass

    def get_source_stamp(self) -> str:
        return stamp()

    def get_disambiguator(self) -> str:
        return str(self._lineno)


class _Impl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Impl


def compiled(function: Any = None, *, parallel: bool = False, **options: Any) -> Any:
    """numba's compiler without checks of bounds and divisions; what it makes is kept for the next process."""
    if function is None:
        return functools.partial(compiled, parallel=parallel, **options)
    kernel = numba.njit(parallel=parallel, nogil=True, error_model="numpy", boundscheck=False, **options)(function)
    if kept() is not None:
        kernel._cache = _Cache(function)
    return kernel


def inlined(function: Any = None, **options: Any) -> Any:
    """A part of kernels, compiled with them.

    What a parallel loop does stands in one: numba rewrites what stands in the loop itself, and not always rightly.
    """
    if function is None:
        return functools.partial(inlined, **options)
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False, **options)(function)


def _lanes() -> int:
    """Keys whose bytes one instruction multiplies: 16 or 8; 0: this machine has no such instruction."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    has = {each[1:] for each in features.split(",") if each.startswith("+")}
    if {"avx512vnni", "avx512bw"} <= has:
        return 16
    return 8 if "avxvnni" in has else 0


LANES = _lanes()
AT_ONCE = 2 * LANES  # keys of one call of `dots`


@intrinsic
def _pointer(context, address):
    def build(context, builder, signature, values):
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), build


@numba.njit(inline="always")
def at(address, length, like):
    """A contiguous array of `length` elements of the dtype of `like`.

    No kernel may use an overload that is inlined: numba then looks for what is dead, and to it what is written to an
    array that nobody returns is.
    """
    return numba.carray(_pointer(address), (length,), like.dtype)


def _ask(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), I32(0), I32(3), I32(1)])


@intrinsic
def prefetch(context, address):
    """Ask for the cache line at an address; whatever it is, nothing happens but that."""

    def build(context, builder, signature, values):
        _ask(builder, values[0])
        return context.get_dummy_value()

    return types.void(types.intp), build


@intrinsic
def ask(context, address, size):
    """Ask for all cache lines of a row of so many bytes: without a loop for up to 4, which would take its time."""

    def build(context, builder, signature, values):
        address, size = values
        last = builder.sub(size, I64(1))
        for begin in map(I64, (0, 64, 128, 192)):
            _ask(builder, builder.add(address, builder.select(builder.icmp_signed("<", begin, last), begin, last)))
        with builder.if_then(builder.icmp_signed(">=", last, I64(256)), likely=False):
            with cgutils.for_range_slice(builder, I64(256), size, I64(64), I64) as (begin, _):
                _ask(builder, builder.add(address, begin))
            _ask(builder, builder.add(address, last))
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
    """float32 of a number of a cache: float32 itself, bfloat16 as uint16, float16 as int16."""

    def build(context, builder, signature, values):
        if number == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(values[0], I32), I32(16)), F32)
        if number == types.int16:
            return builder.fpext(builder.bitcast(values[0], ir.HalfType()), F32)
        return values[0]

    return types.float32(number), build


def _vector(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _spread(builder: Any, number: Any, count: int) -> Any:
    kind = ir.VectorType(number.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), [0] * count))


def _float_at(builder: Any, address: Any, place: Any) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, builder.mul(place, I64(4))), F32.as_pointer()))


def _widened(builder: Any, address: Any, dtype: Any) -> Any:
    """What `widen` makes of the next `WIDE` numbers."""
    if dtype == types.float32:
        return _vector(builder, address, FLOATS)
    raw = _vector(builder, address, ir.VectorType(I16, WIDE))
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), WIDE)), FLOATS)
    wide = ir.VectorType(I32, WIDE)
    return builder.bitcast(builder.shl(builder.zext(raw, wide), ir.Constant(wide, [16] * WIDE)), FLOATS)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDE}f32")
    return builder.call(function, [a, b, c])


@intrinsic
def dot_four(context, like, row, asked, dim, out, stride):
    """Products of a row, like `like`, with float32 `[4, dim]`, to float32 `[4, stride]`: of whole `WIDE`s of `dim`."""

    def build(context, builder, signature, values):
        _, row, asked, dim, out, stride = values
        sums = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * WIDE)) for _ in range(4)]
        with cgutils.for_range(builder, builder.udiv(dim, I64(WIDE))) as loop:
            first = builder.mul(loop.index, I64(WIDE))
            place = builder.add(row, builder.mul(first, I64(signature.args[0].dtype.bitwidth // 8)))
            numbers = _widened(builder, place, signature.args[0].dtype)
            for head, total in enumerate(sums):
                begin = builder.add(first, builder.mul(dim, I64(head)))
                query = _vector(builder, builder.add(asked, builder.mul(begin, I64(4))), FLOATS)
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
    """Add 4 rows, like `like`, weighed by float32 `[4, stride]`, to float32 `[4, dim]`: whole `WIDE`s of `dim`."""

    def build(context, builder, signature, values):
        rows, weights, stride, sums, dim = values[1:5], *values[5:]
        spread = [
            [
                _spread(builder, _float_at(builder, weights, builder.add(builder.mul(stride, I64(head)), I64(i))), WIDE)
                for i in range(4)
            ]
            for head in range(4)
        ]
        with cgutils.for_range(builder, builder.udiv(dim, I64(WIDE))) as loop:
            first = builder.mul(loop.index, I64(WIDE))
            along = builder.mul(first, I64(signature.args[0].dtype.bitwidth // 8))
            numbers = [_widened(builder, builder.add(row, along), signature.args[0].dtype) for row in rows]
            for head in range(4):
                place = builder.add(sums, builder.mul(builder.add(first, builder.mul(dim, I64(head))), I64(4)))
                total = _vector(builder, place, FLOATS)
                for i in range(4):
                    total = _multiply_add(builder, spread[head][i], numbers[i], total)
                builder.store(total, builder.inttoptr(place, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(like, *[types.intp] * 8), build


@intrinsic
def above(context, address, least):
    """A bit for each of the 64 int32 at an address: whether it is at least `least`."""

    def build(context, builder, signature, values):
        numbers = _vector(builder, values[0], ir.VectorType(I32, 64))
        return builder.bitcast(builder.icmp_signed(">=", numbers, _spread(builder, values[1], 64)), I64)

    return types.uint64(types.intp, types.int32), build


@intrinsic
def ones(context, bits):
    """How many bits of an uint64 are 1."""

    def build(context, builder, signature, values):
        return builder.ctpop(values[0])

    return types.int64(types.uint64), build


@intrinsic
def lowest(context, bits):
    """The place of the lowest one of an uint64; 64 for 0."""

    def build(context, builder, signature, values):
        return builder.cttz(values[0], I1(0))

    return types.uint64(types.uint64), build


def _dots(words: int) -> Any:
    @intrinsic
    def dots(context, codes, table, starts, out, stride):
        """`c = 2 p . b - sum(p)` of `AT_ONCE` keys and 4 heads, as int16 `[4, stride]` from `out` on.

        The codes lie one behind the other at `codes`, 64 bits a word. `table` has int32 `[words, 2, 8, 4]`: for each
        half word, shift and head the four bytes of the query whose bits that shift brings to the four bytes of the
        half word. `starts` has int32 `[4]`, the sums.
        """

        def build(context, builder, signature, values):
            lanes, halves = LANES, 2 * words
            vectors = range(AT_ONCE // lanes)  # all of them by a number once it is loaded
            whole, numbers = ir.VectorType(I32, lanes * halves), ir.VectorType(I32, lanes)
            name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
            kind = ir.FunctionType(numbers, [numbers] * 3)
            product = cgutils.get_or_insert_function(builder.module, kind, name)

            def spread(address, place):
                number = builder.load(builder.inttoptr(builder.add(address, I64(4 * place)), I32.as_pointer()))
                return _spread(builder, number, lanes)

            def constant(number):
                return ir.Constant(numbers, [number] * lanes)

            loaded = [_vector(builder, builder.add(values[0], I64(8 * words * lanes * v)), whole) for v in vectors]
            sums = [[constant(0)] * 4 for _ in vectors]
            for half in range(halves):
                places = ir.Constant(numbers, [half + halves * lane for lane in range(lanes)])
                parts = [builder.shuffle_vector(each, each, places) for each in loaded]
                for shift in range(8):
                    bits = [builder.and_(builder.lshr(part, constant(shift)), constant(0x01010101)) for part in parts]
                    for head in range(4):
                        weights = spread(values[1], (8 * half + shift) * 4 + head)
                        for v in vectors:
                            sums[v][head] = builder.call(product, [sums[v][head], bits[v], weights])
            for head in range(4):
                start = spread(values[2], head)
                for v in vectors:
                    score = builder.sub(builder.shl(sums[v][head], constant(1)), start)
                    short = builder.trunc(score, ir.VectorType(I16, lanes))
                    first = builder.add(values[3], I64(2 * lanes * v))
                    place = builder.add(first, builder.mul(values[4], I64(2 * head)))
                    builder.store(short, builder.inttoptr(place, short.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), build

    return dots


dots_1, dots_2 = _dots(1), _dots(2)
