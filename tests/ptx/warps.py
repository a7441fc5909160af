"""Instructions by which the 32 threads of a warp exchange values."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.operands import KINDS, Operands, Step, store
from ptx.program import Fault, Instruction

__all__ = ["WARPS"]

LANES = np.uint64(1) << np.arange(32, dtype=np.uint64)


def _everywhere(mask: Any, threads: int) -> Any:
    return np.ones(threads, bool) if mask is None else mask


def _shuffle(instruction: Instruction, use: Operands) -> Step:
    """`shfl`: the value of another lane, or one's own where that lane is out of the segment."""
    mode = instruction.opcode[2]
    if mode not in ("bfly", "idx", "up", "down"):
        raise Fault(f"unknown part {mode}")
    to, *inside = instruction.operands[0].split("|")
    reads = [use.read(text, "b32") for text in instruction.operands[1:4]]
    put, put_inside = store(use.write(to, "b32")), store(use.write(inside[0], "pred")) if inside else None
    lane, first = use.lane, np.arange(use.program.threads) - use.lane
    known: dict[tuple[bytes, bytes], Any] = {}  # from where, by the last two operands

    def sources(by: Any, limits: Any) -> Any:
        by, limits = by.astype(np.int64) & 31, limits.astype(np.int64)
        end, segment = limits & 31, limits >> 8 & 31
        last = lane & segment | end & ~segment
        if mode == "up":
            other = lane - by
            found = other >= last
        else:
            other = {"bfly": lane ^ by, "idx": lane & segment | by & ~segment, "down": lane + by}[mode]
            found = other <= last
        return np.where(found, first + other, first + lane), found

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        value, by, limits = (registers[i] if turn is None else turn(registers[i]) for i, turn in reads)
        key = by.tobytes(), limits.tobytes()
        if key not in known:
            known[key] = sources(by, limits)
        source, found = known[key]
        if mask is not None and not mask[source[mask]].all():
            raise Fault("a shuffle from a thread that does not take part")
        put(registers, mask, value[source])
        if put_inside is not None:
            put_inside(registers, mask, found)

    return step


def _vote(instruction: Instruction, use: Operands) -> Step:
    kind = instruction.opcode[2]
    if kind not in ("ballot", "any", "all", "uni"):
        raise Fault(f"unknown part {kind}")
    (place, turn), put = use.predicate(instruction.operands[1]), None
    put = store(use.write(instruction.operands[0], "b32" if kind == "ballot" else "pred"))

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        given = registers[place] if turn is None else turn(registers[place])
        active = _everywhere(mask, len(given)).reshape(-1, 32)
        yes, no = given.reshape(-1, 32) & active, ~given.reshape(-1, 32) & active
        if kind == "ballot":
            found = (yes @ LANES).astype(np.uint32)
        else:
            found = {"any": yes.any(1), "all": ~no.any(1), "uni": ~yes.any(1) | ~no.any(1)}[kind]
        put(registers, mask, np.repeat(found, 32))

    return step


REDUCTIONS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


def _reduce(instruction: Instruction, use: Operands) -> Step:
    """`redux`: over the active lanes of each warp, which must be all or none."""
    function, kind = REDUCTIONS[instruction.opcode[2]], instruction.opcode[-1]
    if kind not in ("s32", "u32", "b32"):
        raise Fault(f"unknown part {kind}")
    (place, turn), put = use.read(instruction.operands[1], kind), store(use.write(instruction.operands[0], kind))

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        if mask is not None and (mask.reshape(-1, 32).any(1) != mask.reshape(-1, 32).all(1)).any():
            raise Fault("a reduction over a part of a warp")
        given = registers[place] if turn is None else turn(registers[place])
        found = function.reduce(given.reshape(-1, 32), axis=1).astype(KINDS[kind])
        put(registers, mask, np.repeat(found, 32))

    return step


def _active(instruction: Instruction, use: Operands) -> Step:
    put = store(use.write(instruction.operands[0], "b32"))

    def step(block: Any, mask: Any) -> None:
        active = _everywhere(mask, use.program.threads).reshape(-1, 32)
        put(block.registers, mask, np.repeat((active @ LANES).astype(np.uint32), 32))

    return step


def _elect(instruction: Instruction, use: Operands) -> Step:
    """One lane of each warp: the first."""
    to, elected = instruction.operands[0].split("|")
    put, put_elected = store(use.write(to, "b32")), store(use.write(elected, "pred"))
    lane = use.lane

    def step(block: Any, mask: Any) -> None:
        if mask is not None and (mask & (lane == 0)).sum() * 32 != mask.sum():
            raise Fault("an election in a part of a warp")
        put(block.registers, mask, np.zeros(len(lane), np.uint32))
        put_elected(block.registers, mask, lane == 0)

    return step


WARPS: dict[str, Callable[[Instruction, Operands], Step]] = {
    "shfl": _shuffle, "vote": _vote, "redux": _reduce, "activemask": _active, "elect": _elect,
}  # fmt: skip
