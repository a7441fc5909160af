"""Instructions that read and write memory: loads, stores, atomics and asynchronous copies."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.operands import KINDS, SHARED_AT, UNSIGNED, Operands, Step, store
from ptx.program import Fault, Instruction, listed

__all__ = ["ACCESSES"]

HINTS = ("L1_", "L2_")
HOW = {"nc", "weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "sys", "cluster"}
SPACES = {"global": "global", "shared": "shared", "shared_cta": "shared"}


def _space(instruction: Instruction, known: set[str]) -> tuple[str, int]:
    """Of an access: global or shared, and how many values each thread moves."""
    space, count = None, 1
    for part in instruction.opcode[1:-1]:
        if part in SPACES:
            space = SPACES[part]
        elif part in ("v2", "v4", "v8"):
            count = int(part[1])
        elif part not in known and not part.startswith(HINTS):
            raise Fault(f"unknown part {part}")
    if space is None:
        raise Fault("a generic address")
    return space, count


def _lanes(mask: Any, *arrays: Any) -> tuple[Any, ...]:
    """The elements of the active threads."""
    return arrays if mask is None else tuple(each[mask] for each in arrays)


def _load(instruction: Instruction, use: Operands) -> Step:
    kind, to = instruction.opcode[-1], instruction.operands[0]
    if instruction.opcode[1] == "param":
        return _parameter(instruction, use)
    space, count = _space(instruction, HOW)
    names = listed(to[1:-1]) if to.startswith("{") else [to]
    if len(names) != count:
        raise Fault("operands do not fit")
    signed = kind[0] == "s"
    dtype = np.dtype(KINDS[kind])
    unit, address = dtype.itemsize, use.address(instruction.operands[1])
    puts = [store(use.write(each, kind if signed else f"b{8 * unit}")) for each in names]
    shared = space == "shared"

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        at, stamps = _lanes(mask, address(registers), block.clock.stamps)
        found = (
            block.shared.load(at - SHARED_AT, unit, count, stamps)
            if shared
            else block.memory.load(at, unit, count, stamps)
        )
        for j, put in enumerate(puts):
            value = np.ascontiguousarray(found[:, j])
            if mask is not None:
                wide = np.zeros(len(mask), value.dtype)
                wide[mask] = value
                value = wide
            put(registers, mask, value.view(dtype) if signed else value)

    return step


def _parameter(instruction: Instruction, use: Operands) -> Step:
    name = instruction.operands[1].strip("[] ")
    kind = "b" + instruction.opcode[-1][1:]
    put = store(use.write(instruction.operands[0], kind))
    number = next(i for i, (_, each) in enumerate(use.program.parameters) if each == name)
    dtype = KINDS[kind]

    def step(block: Any, mask: Any) -> None:
        put(block.registers, mask, block.parameters[number].astype(dtype))

    return step


def _store(instruction: Instruction, use: Operands) -> Step:
    space, count = _space(instruction, HOW)
    unit, of = np.dtype(KINDS[instruction.opcode[-1]]).itemsize, instruction.operands[1]
    names = listed(of[1:-1]) if of.startswith("{") else [of]
    if len(names) != count:
        raise Fault("operands do not fit")
    reads = [use.read(each, f"b{8 * unit}") for each in names]
    address, shared = use.address(instruction.operands[0]), space == "shared"

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        values = np.stack([registers[i] if turn is None else turn(registers[i]) for i, turn in reads], axis=1)
        at, values, stamps = _lanes(mask, address(registers), values, block.clock.stamps)
        if shared:
            block.shared.store(at - SHARED_AT, values, stamps)
        else:
            block.memory.store(at, values, stamps)

    return step


def _prefetch(instruction: Instruction, use: Operands) -> Step:
    """Changes nothing; what is fetched must be in a tensor."""
    if tuple(instruction.opcode[1:]) not in (("global", "L1"), ("global", "L2")):
        raise Fault("unknown prefetch")
    address = use.address(instruction.operands[0])

    def step(block: Any, mask: Any) -> None:
        (at,) = _lanes(mask, address(block.registers))
        for segment, _, offsets in block.memory.parts(at):
            segment.places(offsets, 1, 1)

    return step


ATOMIC: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new,
    "cas": lambda old, expected, new: new if old == expected else old,
}  # fmt: skip


def _atomic(instruction: Instruction, use: Operands) -> Step:
    """`atom` and `red`: the lanes in random order."""
    parts, kind = instruction.opcode, instruction.opcode[-1]
    (name,) = (each for each in parts if each in ATOMIC)
    space, _ = _space(instruction, HOW | set(ATOMIC))
    to, where, *of = instruction.operands if parts[0] == "atom" else ("_", *instruction.operands)
    if (kind in ("b32", "b64") and name == "add") or kind not in KINDS:
        raise Fault(f"unknown atomic of {kind}")
    function, dtype, address = ATOMIC[name], KINDS[kind], use.address(where)
    unit, reads = np.dtype(dtype).itemsize, [use.read(each, kind) for each in of]
    wanted = to in use.program.read
    put = store(use.write(to, f"b{8 * unit}")) if wanted else None
    acquires = bool({"acquire", "acq_rel"} & set(parts)) and space == "global"
    releases = bool({"release", "acq_rel"} & set(parts)) and space == "global"

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        values = [registers[i] if turn is None else turn(registers[i]) for i, turn in reads]
        at, stamps, *values = _lanes(mask, address(registers), block.clock.stamps, *values)
        old = np.zeros(len(at), dtype)
        if acquires:
            block.clock.acquire(at)
        if releases:
            block.clock.release(at)
        parts = [(block.shared, slice(None), at - SHARED_AT)] if space == "shared" else block.memory.parts(at)
        for memory, lanes, offsets in parts:
            (places, _), view = memory.atomic(offsets, unit, stamps[lanes]), memory.views[unit].view(dtype)
            order = block.random.permutation(len(places))
            places, given = places[order], [each[lanes][order] for each in values]
            if not wanted and isinstance(function, np.ufunc):
                function.at(view, places, given[0])
                continue
            found = np.empty(len(places), dtype)
            for j, place in enumerate(places.tolist()):
                found[j] = view[place]
                view[place] = function(view[place], *(each[j] for each in given))
            back = np.empty_like(found)
            back[order] = found
            old[lanes] = back
        if put is not None:
            if mask is not None:
                wide = np.zeros(len(mask), dtype)
                wide[mask] = old
                old = wide
            put(registers, mask, old.view(UNSIGNED[unit]))

    return step


def _copy(instruction: Instruction, use: Operands) -> Step:
    """`cp.async`, which lands as late as it may: at the wait for its group."""
    parts, operands = instruction.opcode, instruction.operands
    if parts[2] == "commit_group":
        return _commit
    if parts[2] in ("wait_group", "wait_all"):
        left = int(operands[0], 0) if operands else None
        return lambda block, mask: _wait(block, mask, left)
    if parts[2] not in ("ca", "cg") or any(
        each not in ("shared", "shared_cta", "global") and not each.startswith(HINTS) for each in parts[3:]
    ):
        raise Fault("unknown asynchronous copy")
    to, of, size = use.address(operands[0]), use.address(operands[1]), int(operands[2], 0)
    taken = use.read(operands[3], "u32") if len(operands) > 3 else None
    count = size // 4

    def step(block: Any, mask: Any) -> None:
        registers = block.registers
        there, here = to(registers) - SHARED_AT, of(registers)
        values = np.zeros((len(here), count), np.uint32)
        active = np.ones(len(here), bool) if mask is None else mask
        loads = active
        if taken is not None:
            place, turn = taken
            bytes_taken = registers[place] if turn is None else turn(registers[place])
            if ((bytes_taken != size) & (bytes_taken != 0) & active).any():
                raise Fault("a copy of a part of its size")
            loads = active & (bytes_taken == size)
        if loads.any():
            values[loads] = block.memory.load(here[loads], 4, count, block.clock.stamps[loads])
        block.shared.begin_copy(there[active], 4, count, block.clock.stamps[active])
        block.copies.append((there[active], values[active], active))

    return step


def _commit(block: Any, mask: Any) -> None:
    if mask is not None:
        raise Fault("only some threads commit their copies")
    block.groups.append(block.copies)
    block.copies = []


def _wait(block: Any, mask: Any, left: int | None) -> None:
    """Until `left` groups are under way; without a number, for those that are in no group, too."""
    if mask is not None:
        raise Fault("only some threads wait for their copies")
    if left is None:
        _commit(block, mask)
        left = 0
    while len(block.groups) > left:
        for at, values, active in block.groups.pop(0):
            block.shared.land(at, values, block.clock.stamps[active])


ACCESSES: dict[str, Callable[[Instruction, Operands], Step]] = {
    "ld": _load, "st": _store, "atom": _atomic, "red": _atomic, "cp": _copy, "prefetch": _prefetch,
}  # fmt: skip
