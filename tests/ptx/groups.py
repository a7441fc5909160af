"""Matrix products of groups of four warps (WGMMA), of which one matrix or both lie in shared memory."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.matrices import numbers, product_shape, total
from ptx.operands import SHARED_AT, Operands, Step, store
from ptx.program import Fault, Instruction, listed

__all__ = ["GROUPS"]

BYTES = {"s8": 1, "u8": 1, "bf16": 2, "f16": 2, "tf32": 4}
SWIZZLED = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row that lie together, by the mode in a descriptor


def _described(block: Any, group: int, descriptor: int, rows: int, depth: int, kind: str, *, across: bool) -> Any:
    """The matrix [rows, depth] of a descriptor; `across`: neighbours in memory are of neighbouring rows."""
    if descriptor >> 49 & 7:
        raise Fault("a descriptor with a base offset")
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    size, span = BYTES[kind], SWIZZLED[descriptor >> 62 & 3]
    if across:  # chunks of 16 bytes: of each position in the depth, and of neighbouring rows
        chunk, line = np.meshgrid(np.arange(rows * size // 16) * 16, np.arange(depth), indexing="ij")
        at = chunk // span * leading + line // 8 * stride + line % 8 * span + chunk % span
    else:
        line, chunk = np.meshgrid(np.arange(rows), np.arange(depth * size // 16) * 16, indexing="ij")
        at = line // 8 * stride + line % 8 * span + (chunk // 16 * leading if span == 16 else chunk)
    at += start
    at ^= (at >> 7 & (span // 16 - 1)) << 4
    stamps = np.repeat(np.array(block.clock.now + 96, np.int64), at.size)  # of no warp: all four read it
    words = block.shared.load(at.ravel() - SHARED_AT, 4, 4, stamps).reshape(*at.shape, 4)
    values = numbers(words, kind).reshape(*at.shape, -1)
    if across:
        return values.transpose(0, 2, 1).reshape(rows, depth)
    return values.reshape(rows, depth)


def _multiply(instruction: Instruction, use: Operands) -> Step:
    if instruction.opcode[1] in ("fence", "commit_group", "wait_group"):
        return lambda block, mask: None
    (_, columns, depth), parts = product_shape(instruction), instruction.opcode
    result, kind = parts[-3], parts[-1]
    if parts[1] != "mma_async" or kind not in BYTES or parts[-2] != kind or result not in ("f32", "s32"):
        raise Fault("unknown product")
    to, a, b, kept, *flags = instruction.operands
    if kind in ("bf16", "f16", "tf32") and any(int(each) != 1 for each in flags[:2]):
        raise Fault("a product with a changed sign")
    across = [int(each) != 0 for each in flags[2:]]
    left_across = across[0] if len(across) == 2 else False
    right_across = across[-1] if across else False
    names = listed(to[1:-1])
    puts, sums = [store(use.write(each, result)) for each in names], [use.read(each, result) for each in names]
    in_registers = a.startswith("{")
    lefts = [use.read(each, "b32") for each in listed(a[1:-1])] if in_registers else [use.read(a, "b64")]
    (right, _), (keeps, turn_keeps) = use.read(b, "b64"), use.predicate(kept)
    groups, wide = use.program.threads // 128, np.float32 if result == "f32" else np.int32
    saturates = "satfinite" in parts

    def step(block: Any, mask: Any) -> None:
        if mask is not None:
            raise Fault("a product without all threads")
        registers = block.registers
        made = []
        held = np.stack([registers[i] if turn is None else turn(registers[i]) for i, turn in lefts])
        for group in range(groups):
            own = slice(128 * group, 128 * group + 128)
            if in_registers:
                values = numbers(held[:, own].reshape(-1, 2, 4, 8, 4), kind)
                first = values.transpose(2, 1, 3, 0, 4, 5).reshape(64, depth)
            else:
                first = _described(block, group, int(held[0, 128 * group]), 64, depth, kind, across=left_across)
            described = int(registers[right][128 * group])
            second = _described(block, group, described, columns, depth, kind, across=right_across)
            made.append(first @ second.T)
        found = np.stack(made).reshape(groups, 4, 2, 8, columns // 8, 4, 2)
        found = found.transpose(4, 2, 6, 0, 1, 3, 5).reshape(len(names), -1)
        keep = registers[keeps] if turn_keeps is None else turn_keeps(registers[keeps])
        for put, (place, turn), new in zip(puts, sums, found, strict=True):
            if not keep.any():  # the sums may be registers that nothing wrote
                before = np.zeros(len(keep), wide)
            else:
                before = registers[place] if turn is None else turn(registers[place])
                before = before if keep.all() else np.where(keep, before, wide(0))
            put(registers, None, total(before, new, saturates))

    return step


GROUPS: dict[str, Callable[[Instruction, Operands], Step]] = {"wgmma": _multiply}
