"""What numba lacks: addresses, numbers of 16 bits, products of bytes, prefetching; and how kernels are compiled here.

A kernel takes addresses and strides (in elements), as those on a GPU do, so that it is compiled once for a dtype
whatever the layout. The element type of keys is that of the empty array `like` it is given first: uint16 stands for
bfloat16, int16 for float16.
"""

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, overload

from bpc_calib.cpu.folder import kept, stamp

__all__ = [
    "AT_ONCE",
    "LANES",
    "above",
    "at",
    "compiled",
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
    """A contiguous array of `length` elements of the dtype of `like`."""
    return numba.carray(_pointer(address), (length,), like.dtype)


@intrinsic
def prefetch(context, address):
    """Ask for the cache line at an address; whatever it is, nothing happens but that."""

    def build(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(types.intp), build


@intrinsic
def float_of(context, bits):
    """The float32 that an int32 has the bits of."""

    def build(context, builder, signature, values):
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.int32), build


@intrinsic
def _of_half(context, bits):
    def build(context, builder, signature, values):
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), build


def widen(number):
    """float32 of a number of a cache: float32 itself, bfloat16 as uint16, float16 as int16."""
    raise NotImplementedError


@overload(widen, inline="always")
def _widen(number):
    if number == types.uint16:
        return lambda number: float_of(np.int32(np.uint32(number) << np.uint32(16)))
    if number == types.int16:
        return lambda number: _of_half(number)
    return lambda number: np.float32(number)


def _vector(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


@intrinsic
def above(context, address, least):
    """A bit for each of the 64 int32 at an address: whether it is at least `least`."""

    def build(context, builder, signature, values):
        kind = ir.VectorType(I32, 64)
        numbers = _vector(builder, values[0], kind)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), values[1], I32(0))
        spread = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, 64), [0] * 64))
        return builder.bitcast(builder.icmp_signed(">=", numbers, spread), I64)

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
                first = builder.insert_element(ir.Constant(numbers, ir.Undefined), number, I32(0))
                return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

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
