"""Instructions that compute each thread's value from its own operands."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.operands import KINDS, Operands, Step, apply, only
from ptx.program import Instruction
from ptx.rounding import from_bfloat16, to_bfloat16

__all__ = ["ARITHMETIC"]

WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
PACKED = {"s16x2": ("s16", "b32"), "u16x2": ("u16", "b32"), "f16x2": ("f16", "b32"), "f32x2": ("f32", "b64")}
# What says how exactly to compute (exactly, here), or what to do with denormal floats (nothing).
SILENT = {"rn", "ftz", "approx", "full", "lo", "sync", "b"}


def _same(function: Callable[..., Any], kind: str) -> tuple[Callable[..., Any], str]:
    """A function of one type, and the type that its operands have as bits."""
    if kind in PACKED:
        parts, whole = PACKED[kind]
        part, bits = np.dtype(KINDS[parts]), KINDS[whole]
        return lambda *values: function(*[each.view(part) for each in values]).astype(part).view(bits), whole
    if kind in ("bf16", "bf16x2"):
        whole = "b16" if kind == "bf16" else "b32"

        def rounded(*values: Any) -> Any:
            wide = function(*[from_bfloat16(each.view(np.uint16)) for each in values])
            return to_bfloat16(wide).view(values[0].dtype)

        return rounded, whole
    return function, kind


def _elementwise(function: Callable[..., Any], count: int) -> Callable[..., Step]:
    def build(instruction: Instruction, use: Operands) -> Step:
        kind = instruction.opcode[-1]
        only(instruction, SILENT)
        made, bits = _same(function, kind)
        return apply(use, instruction, made, [bits] * count, bits)

    return build


def _bits(function: Callable[..., Any], count: int) -> Callable[..., Step]:
    """Of bits or predicates, or of integers without regard to their sign."""

    def build(instruction: Instruction, use: Operands) -> Step:
        only(instruction, SILENT)
        kind = instruction.opcode[-1]
        kind = "pred" if kind == "pred" else "b" + kind[1:]
        return apply(use, instruction, function, [kind] * count, kind)

    return build


def _additive(function: Callable[..., Any]) -> Callable[..., Step]:
    """Integers alike with sign and without it."""
    floats, integers = _elementwise(function, 2), _bits(function, 2)
    return lambda instruction, use: (integers if re.fullmatch(r"[su](16|32|64)", instruction.opcode[-1]) else floats)(
        instruction, use
    )


def _multiply(instruction: Instruction, use: Operands) -> Step:
    """`mul` and `mad`, with all bits of the product, the high ones or the low ones."""
    kind, parts = instruction.opcode[-1], instruction.opcode
    adds = parts[0] == "mad"
    result = kind
    if "wide" in parts:
        only(instruction, {"wide"})
        result, wide = WIDE[kind], KINDS[WIDE[kind]]

        def function(x: Any, y: Any, z: Any = None) -> Any:
            product = x.astype(wide) * y.astype(wide)
            return product if z is None else product + z

    elif "hi" in parts:
        only(instruction, {"hi"})
        dtype, size = KINDS[kind], 8 * np.dtype(KINDS[kind]).itemsize

        def function(x: Any, y: Any, z: Any = None) -> Any:
            if kind in WIDE:
                high = ((x.astype(KINDS[WIDE[kind]]) * y.astype(KINDS[WIDE[kind]])) >> size).astype(dtype)
            else:
                high = ((x.astype(object) * y.astype(object)) >> size).astype(dtype)
            return high if z is None else high + z

    elif kind[0] in "su":
        only(instruction, {"lo"})
        kind = result = "b" + kind[1:]

        def function(x: Any, y: Any, z: Any = None) -> Any:
            return x * y if z is None else x * y + z

    else:
        return _elementwise(np.multiply, 2)(instruction, use)
    return apply(use, instruction, function, [kind, kind, result][: 3 if adds else 2], result)


def _fused(x: Any, y: Any, z: Any) -> Any:
    wide = np.longdouble
    return (x.astype(wide) * y.astype(wide) + z.astype(wide)).astype(x.dtype)


def _divide(instruction: Instruction, use: Operands) -> Step:
    kind = instruction.opcode[-1]
    if kind[0] == "f":
        return _elementwise(np.divide, 2)(instruction, use)
    return apply(use, instruction, _quotient, [kind, kind], kind)


def _quotient(x: Any, y: Any) -> Any:
    """Toward 0; of a division by 0, some number."""
    y = np.where(y == 0, 1, y).astype(y.dtype)
    floor = x // y
    return (floor + ((x % y != 0) & ((x < 0) ^ (y < 0)))).astype(x.dtype)


def _remainder(instruction: Instruction, use: Operands) -> Step:
    kind = instruction.opcode[-1]
    return apply(use, instruction, lambda x, y: np.fmod(x, np.where(y == 0, 1, y).astype(y.dtype)), [kind] * 2, kind)


def _extreme(numbers: Callable[..., Any], always: Callable[..., Any]) -> Callable[..., Step]:
    """`min` and `max`: of floats the one that is a number, or NaN with `.NaN`."""

    def build(instruction: Instruction, use: Operands) -> Step:
        only(instruction, {"NaN", "ftz", "relu"})
        kind = instruction.opcode[-1]
        function = numbers if "f" in kind and "NaN" not in instruction.opcode else always
        if "relu" in instruction.opcode:
            made, bits = _same(lambda x, y: np.maximum(function(x, y), 0), kind)
        else:
            made, bits = _same(function, kind)
        return apply(use, instruction, made, [bits] * 2, bits)

    return build


def _of_float(function: Callable[..., Any]) -> Callable[..., Step]:
    """In float64, then rounded."""
    return _elementwise(lambda x: function(x.astype(np.float64)).astype(x.dtype), 1)


def _dot4(instruction: Instruction, use: Operands) -> Step:
    """`dp4a`: the product of two vectors of four bytes, and a sum."""
    _, x_kind, y_kind = instruction.opcode
    result = "s32" if "s32" in (x_kind, y_kind) else "u32"

    def function(x: Any, y: Any, z: Any) -> Any:
        x, y = (
            each.view(np.int8 if kind == "s32" else np.uint8).reshape(-1, 4).astype(np.int64)
            for each, kind in ((x, x_kind), (y, y_kind))
        )
        return ((x * y).sum(1) + z).astype(KINDS[result])

    return apply(use, instruction, function, ["b32", "b32", result], result)


ARITHMETIC: dict[str, Callable[[Instruction, Operands], Step]] = {
    "add": _additive(np.add), "sub": _additive(np.subtract), "mul": _multiply, "mad": _multiply,
    "fma": _elementwise(_fused, 3), "div": _divide, "rem": _remainder, "neg": _elementwise(np.negative, 1),
    "abs": _elementwise(np.abs, 1), "min": _extreme(np.fmin, np.minimum), "max": _extreme(np.fmax, np.maximum),
    "rcp": _elementwise(lambda x: (x.dtype.type(1) / x), 1), "sqrt": _elementwise(np.sqrt, 1),
    "rsqrt": _of_float(lambda x: 1 / np.sqrt(x)), "ex2": _of_float(np.exp2), "lg2": _of_float(np.log2),
    "sin": _of_float(np.sin), "cos": _of_float(np.cos), "tanh": _of_float(np.tanh), "and": _bits(np.bitwise_and, 2),
    "or": _bits(np.bitwise_or, 2), "xor": _bits(np.bitwise_xor, 2), "not": _bits(np.invert, 1),
 "dp4a": _dot4,
    "copysign": _elementwise(lambda sign, x: np.copysign(x, sign), 2),
}  # fmt: skip
