"""Products of codes with rounded queries, by the instructions that multiply bytes where the machine has them."""

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from bpc_calib.backends.cpu.language import splat, vector_at

__all__ = ["AT_ONCE", "LANES", "dots_1", "dots_2"]

I16, I32, I64 = (ir.IntType(bits) for bits in (16, 32, 64))


def _lanes() -> int:
    """Keys whose bytes one instruction multiplies: 16 or 8; 0: this machine has no such instruction."""
    features = _features()
    if {"avx512vnni", "avx512bw"} <= features:
        return 16
    return 8 if "avxvnni" in features else 0


def _features() -> set[str]:
    """The instruction sets, by LLVM's names, that numba compiles for."""
    if config.CPU_FEATURES is None:
        return {name for name, has in get_host_cpu_features().items() if has}
    return {each[1:] for each in config.CPU_FEATURES.split(",") if each.startswith("+")}


LANES = _lanes()
AT_ONCE = 2 * LANES  # keys of one call of `dots`


def _dots(words: int) -> Any:
    @intrinsic
    def dots(context, codes, table, starts, out, stride):
        """`c = 2 p . b - sum(p)` of `AT_ONCE` keys and 4 heads, as int16 `[4, stride]` from `out` on.

        The codes are contiguous at `codes`, `words` of 64 bits per key. `table` is int32 `[words, 2, 8, 4]`: for each
        half word, shift and head the four bytes of the query whose bits that shift brings to the lowest bits of the
        four bytes of the half word. `starts` is int32 `[4]`, the sums of the queries.
        """

        def build(context, builder, signature, values):
            lanes, halves = LANES, 2 * words
            vectors = range(AT_ONCE // lanes)  # each number, once loaded, multiplies all of them
            whole, numbers = ir.VectorType(I32, lanes * halves), ir.VectorType(I32, lanes)
            name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
            kind = ir.FunctionType(numbers, [numbers] * 3)
            product = cgutils.get_or_insert_function(builder.module, kind, name)

            def splat_at(address, place):
                number = builder.load(builder.inttoptr(builder.add(address, I64(4 * place)), I32.as_pointer()))
                return splat(builder, number, lanes)

            def constant(number):
                return ir.Constant(numbers, [number] * lanes)

            loaded = [vector_at(builder, builder.add(values[0], I64(8 * words * lanes * v)), whole) for v in vectors]
            sums = [[constant(0)] * 4 for _ in vectors]
            for half in range(halves):
                places = ir.Constant(numbers, [half + halves * lane for lane in range(lanes)])
                parts = [builder.shuffle_vector(each, each, places) for each in loaded]
                for shift in range(8):
                    bits = [builder.and_(builder.lshr(part, constant(shift)), constant(0x01010101)) for part in parts]
                    for head in range(4):
                        weights = splat_at(values[1], (8 * half + shift) * 4 + head)
                        for v in vectors:
                            sums[v][head] = builder.call(product, [sums[v][head], bits[v], weights])
            for head in range(4):
                start = splat_at(values[2], head)
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
