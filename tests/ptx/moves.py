"""Instructions that move, compare and convert registers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.operands import KINDS, UNSIGNED, Operands, Step, apply, store
from ptx.program import Fault, Instruction, listed
from ptx.rounding import from_half, to_bfloat16, to_tf32

__all__ = ["MOVES"]

NEVER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
ROUND = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _move(instruction: Instruction, use: Operands) -> Step:
    kind, (to, of) = instruction.opcode[-1], instruction.operands
    if to.startswith("{"):
        return _split(use, listed(to[1:-1]), of, kind)
    if of.startswith("{"):
        return _join(use, to, listed(of[1:-1]), kind)
    kind = kind if kind == "pred" else "b" + kind[1:]
    return apply(use, instruction, lambda x: x, [kind], kind)


def _split(use: Operands, to: list[str], of: str, kind: str) -> Step:
    size = np.dtype(KINDS[kind]).itemsize // len(to)
    (place, turn), part = use.read(of, kind), "b" + str(8 * size)
    puts = [store(use.write(each, part)) for each in to]

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        whole = registers[place] if turn is None else turn(registers[place])
        parts = np.ascontiguousarray(whole).view(UNSIGNED[size]).reshape(-1, len(to))
        for j, put in enumerate(puts):
            put(registers, mask, np.ascontiguousarray(parts[:, j]))

    return step


def _join(use: Operands, to: str, of: list[str], kind: str) -> Step:
    size = np.dtype(KINDS[kind]).itemsize // len(of)
    reads, put = [use.read(each, "b" + str(8 * size)) for each in of], store(use.write(to, "b" + kind[1:]))

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        parts = [registers[i] if turn is None else turn(registers[i]) for i, turn in reads]
        put(registers, mask, np.stack(parts, axis=1).view(UNSIGNED[size * len(of)])[:, 0])

    return step


def _select(instruction: Instruction, use: Operands) -> Step:
    kind = "b" + instruction.opcode[-1][1:]
    return apply(use, instruction, lambda x, y, first: np.where(first, x, y), [kind, kind, "pred"], kind)


def _compare(instruction: Instruction, use: Operands) -> Step:
    """`setp`: a comparison, perhaps together with another predicate; perhaps its opposite, too."""
    parts, kind = [each for each in instruction.opcode[1:] if each != "ftz"], instruction.opcode[-1]
    comparison = _comparison(parts[0], kind)
    both = parts[1] if parts[1] in COMBINE else None
    reads = [use.read(text, kind) for text in instruction.operands[1:3]]
    reads += [use.predicate(text) for text in instruction.operands[3:]]
    if (both is None) != (len(reads) == 2):
        raise Fault("operands do not fit")
    to, *opposite = instruction.operands[0].split("|")
    put = store(use.write(to, "pred"))
    put_opposite = store(use.write(opposite[0], "pred")) if opposite else None

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        x, y, *other = (registers[i] if turn is None else turn(registers[i]) for i, turn in reads)
        found = comparison(x, y)
        if put_opposite is not None:
            put_opposite(registers, mask, ~found if both is None else COMBINE[both](~found, other[0]))
        put(registers, mask, found if both is None else COMBINE[both](found, other[0]))

    return step


def _comparison(name: str, kind: str) -> Callable[[Any, Any], Any]:
    if kind[0] != "f":
        return COMPARE[NEVER.get(name, name)]
    if name in ("num", "nan"):
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == (name == "nan")
    if name == "ne":
        return lambda x, y: (x != y) & ~np.isnan(x) & ~np.isnan(y)
    if name.endswith("u"):  # true of NaN
        return lambda x, y: COMPARE[name[:-1]](x, y) | np.isnan(x) | np.isnan(y)
    return COMPARE[name]


def _convert(instruction: Instruction, use: Operands) -> Step:
    *how, to, of = instruction.opcode[1:]
    if unknown := set(how) - {"rn", "rna", "rz", "ftz", *ROUND}:
        raise Fault(f"unknown part {', '.join(sorted(unknown))}")
    if to in ("bf16x2", "f16x2") and of == "f32":
        narrow = _narrow(to[:-2])
        return apply(
            use, instruction, lambda high, low: np.stack([narrow(low), narrow(high)], axis=1).view(np.uint32)[:, 0],
            ["f32"] * 2, "b32",
        )  # fmt: skip
    if "rz" in how:
        raise Fault("unknown part rz")
    if to == "tf32":
        return apply(use, instruction, to_tf32, ["b32"], "b32")
    if to in ("bf16", "f16"):
        narrow = _narrow(to)
        return apply(use, instruction, lambda x: narrow(x.astype(np.float32)), [of], "b16")
    if of in ("bf16", "f16"):
        if KINDS[to]().dtype.kind != "f":
            function = _to_integer(how, to)
            return apply(use, instruction, lambda x: function(from_half(x, of)), ["b16"], to)
        return apply(use, instruction, lambda x: from_half(x, of).astype(KINDS[to]), ["b16"], to)
    if of[0] == "f" and to[0] != "f":
        return apply(use, instruction, _to_integer(how, to), [of], to)
    if of[0] == "f" and to == of and (rounds := set(how) & set(ROUND)):
        return apply(use, instruction, ROUND[rounds.pop()], [of], to)
    return apply(use, instruction, lambda x: x.astype(KINDS[to]), [of], to)


def _narrow(kind: str) -> Callable[[Any], Any]:
    return to_bfloat16 if kind == "bf16" else lambda x: x.astype(np.float16).view(np.uint16)


def _to_integer(how: list[str], to: str) -> Callable[[Any], Any]:
    """Rounded as asked; beyond the type its ends, and 0 of NaN."""
    (rounds,) = (ROUND[each] for each in how if each in ROUND)
    ends, dtype = np.iinfo(KINDS[to]), KINDS[to]

    def function(x: Any) -> Any:
        wide = rounds(x.astype(np.longdouble))
        return np.where(np.isnan(wide), 0, np.clip(wide, ends.min, ends.max)).astype(dtype)

    return function


MOVES: dict[str, Callable[[Instruction, Operands], Step]] = {
    "mov": _move, "cvta": _move, "selp": _select, "setp": _compare, "cvt": _convert,
}  # fmt: skip
