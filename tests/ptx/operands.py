"""Operands as places in one list, where a block keeps registers, constants and the like as arrays [threads]."""

import re
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np

from ptx.program import Fault, Instruction, Program

__all__ = ["KINDS", "SHARED_AT", "UNSIGNED", "Operands", "Step", "apply", "blend", "only", "store"]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS: dict[str, Any] = {
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "u8": np.uint8, "u16": np.uint16,
    "u32": np.uint32, "u64": np.uint64, "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "pred": np.bool_,
}  # fmt: skip
SHARED_AT = 1024  # the address where shared memory begins: not 0, where lost pointers point
SPECIAL = {"%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1, "%ctaid": None, "%nctaid": None}
ADDRESS = re.compile(r"\[\s*(%?[\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]$")

Step = Callable[[Any, Any], None]  # of the block and the mask of its active threads, None for all of them
Place = tuple[int, Callable[[Any], Any] | None]  # in the list, and what makes the wanted type of what lies there


class Operands:
    """Gives every operand of a program its place; `constants` is the list as a block begins, None where it is unset."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.places: dict[Any, int] = {}
        self.constants: list[Any] = []
        self.lane = np.arange(program.threads) % 32
        self.warp = np.arange(program.threads) // 32

    def place(self, key: Any, value: Any = None) -> int:
        if key not in self.places:
            self.places[key] = len(self.constants)
            self.constants.append(value)
        return self.places[key]

    def read(self, text: str, kind: str) -> Place:
        """Where an operand lies, and how it becomes an array of a type."""
        wanted = np.dtype(KINDS[kind])
        if wanted == np.bool_:
            return self.predicate(text)
        if (value := self._constant(text, wanted)) is not None:
            return self.place((text, kind), value), None
        if text.startswith(("%ctaid.", "%nctaid.")):
            return self.place(text), _converted(4, wanted)
        if not (width := self.program.width(text)):
            raise Fault(f"unknown operand {text!r}")
        return self.place(text), _converted(width, wanted)

    def _constant(self, text: str, wanted: Any) -> Any:
        threads = self.program.threads
        if text.startswith(("0f", "0F")):
            value = np.full(threads, int(text[2:], 16), np.uint32).view(np.float32)
            return value if wanted.kind == "f" and wanted.itemsize == 4 else value.view(np.uint32).astype(wanted)
        if text.startswith(("0d", "0D")):
            return np.full(threads, int(text[2:], 16), np.uint64).view(wanted)
        if re.fullmatch(r"-?(0x[\da-fA-F]+|\d+)U?", text):
            bits = int(text.rstrip("U"), 0) & ((1 << 8 * wanted.itemsize) - 1)
            return np.full(threads, bits, UNSIGNED[wanted.itemsize]).view(wanted)
        if text == "global_smem":
            return np.full(threads, SHARED_AT, wanted)
        if text == "%tid.x":
            return np.arange(threads).astype(wanted)
        if text == "%laneid":
            return self.lane.astype(wanted)
        if text == "%ntid.x":
            return np.full(threads, threads, wanted)
        if isinstance(value := SPECIAL.get(text), int):
            return np.full(threads, value, wanted)
        return None

    def predicate(self, text: str) -> Place:
        if text.startswith("!"):
            place, _ = self.predicate(text[1:])
            return place, np.logical_not
        if re.fullmatch(r"-?\d+|true|false", text):
            return self.place((text, "pred"), np.full(self.program.threads, text not in ("0", "false"))), None
        if self.program.width(text) != 0:
            raise Fault(f"{text!r} is not a predicate")
        return self.place(text), None

    def write(self, text: str, kind: str) -> Place:
        """Where a result goes, and how it becomes what lies there."""
        if text == "_":
            return self.place("_"), None
        width, made = self.program.width(text), np.dtype(KINDS[kind])
        if width is None or (width == 0) != (made == np.bool_):
            raise Fault(f"{text!r} cannot hold {kind}")
        if width == 0 or made == UNSIGNED[width]:
            return self.place(text), None
        if width == made.itemsize:
            return self.place(text), methodcaller("view", UNSIGNED[width])
        if made.kind == "f":
            made = np.dtype(UNSIGNED[made.itemsize])
            return self.place(text), lambda value: value.view(made).astype(UNSIGNED[width])
        return self.place(text), methodcaller("astype", UNSIGNED[width])

    def address(self, text: str) -> Callable[[list[Any]], Any]:
        """Of a block's list, int64 [threads]."""
        match = ADDRESS.match(text)
        if match is None:
            raise Fault(f"unknown address {text!r}")
        base, offset = match.group(1), int(match.group(2) or "0", 0)
        place, _ = self.read(base, "u64")
        if self.program.width(base) == 4:
            return lambda registers: registers[place].astype(np.int64) + offset
        if offset == 0:
            return lambda registers: registers[place].view(np.int64)
        return lambda registers: registers[place].view(np.int64) + offset


def _converted(width: int, wanted: Any) -> Callable[[Any], Any] | None:
    if wanted == UNSIGNED[width]:
        return None
    if wanted.itemsize == width:
        return methodcaller("view", wanted)
    same = UNSIGNED[wanted.itemsize]
    return lambda value: value.astype(same).view(wanted)


def blend(mask: Any, new: Any, old: Any) -> Any:
    """The new values of the active threads; the others keep theirs, or garbage where they have none."""
    if old is None:
        old = np.zeros(1, bool) if new.dtype == np.bool_ else np.full(1, 0xA5, np.uint8).repeat(new.itemsize)
        old = old.view(new.dtype)
    return np.where(mask, new, old)


def store(place: Place) -> Callable[[list[Any], Any, Any], None]:
    """Puts a result into a block's list: `put(registers, mask, value)`."""
    at, convert = place

    def put(registers: list[Any], mask: Any, value: Any) -> None:
        if convert is not None:
            value = convert(value)
        registers[at] = value if mask is None else blend(mask, value, registers[at])

    return put


def apply(use: Operands, instruction: Instruction, function: Callable[..., Any], kinds: list[str], result: str) -> Step:
    """The step that writes `function` of the operands behind the first, which have the types `kinds`."""
    reads = [use.read(text, kind) for text, kind in zip(instruction.operands[1:], kinds, strict=False)]
    if len(reads) != len(kinds):
        raise Fault("too few operands")
    at, convert = use.write(instruction.operands[0], result)
    if len(reads) == 2 and convert is None and reads[0][1] is None and reads[1][1] is None:
        a, b = reads[0][0], reads[1][0]

        def direct(block: Any, mask: Any) -> None:
            registers = block.registers
            value = function(registers[a], registers[b])
            registers[at] = value if mask is None else blend(mask, value, registers[at])

        return direct

    def general(block: Any, mask: Any) -> None:
        registers = block.registers
        value = function(*[registers[i] if turn is None else turn(registers[i]) for i, turn in reads])
        if convert is not None:
            value = convert(value)
        registers[at] = value if mask is None else blend(mask, value, registers[at])

    return general


def only(instruction: Instruction, known: set[str]) -> None:
    """An instruction has a type at its end and nothing between but what is known."""
    if unknown := set(instruction.opcode[1:-1]) - known:
        raise Fault(f"unknown part {', '.join(sorted(unknown))}")
