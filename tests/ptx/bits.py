"""Instructions on the bits of each thread's operands: shifts, fields, bytes, counts."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.operands import KINDS, UNSIGNED, Operands, Step, apply, only
from ptx.program import Instruction

__all__ = ["BITS"]


def _logic3(instruction: Instruction, use: Operands) -> Step:
    """`lop3`: bit i of the table is the result where the three bits are those of i."""
    table = int(instruction.operands[4], 0)

    def function(x: Any, y: Any, z: Any) -> Any:
        result = np.zeros_like(x)
        for i in range(8):
            if table >> i & 1:
                result |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return result

    return apply(use, instruction, function, ["b32"] * 3, "b32")


def _shift(instruction: Instruction, use: Operands) -> Step:
    kind, left = instruction.opcode[-1], instruction.opcode[0] == "shl"
    size, signed = 8 * np.dtype(KINDS[kind]).itemsize, kind[0] == "s"
    dtype, most = KINDS[kind], np.uint32(size - 1)

    def function(x: Any, by: Any) -> Any:
        within = np.minimum(by, most).astype(dtype)
        if signed:
            return x >> within
        shifted = x << within if left else x >> within
        return np.where(by > most, dtype(0), shifted) if by.max() > most else shifted

    return apply(use, instruction, function, [kind, "u32"], kind)


def _funnel(instruction: Instruction, use: Operands) -> Step:
    """`shf`: 32 bits out of 64."""
    _, side, mode, _ = instruction.opcode

    def function(low: Any, high: Any, by: Any) -> Any:
        by = np.minimum(by, 32) if mode == "clamp" else by & np.uint32(31)
        whole, by = high.astype(np.uint64) << np.uint64(32) | low, by.astype(np.uint64)
        return (whole >> by if side == "r" else whole << by >> np.uint64(32)).astype(np.uint32)

    return apply(use, instruction, function, ["b32"] * 3, "b32")


def _extract(instruction: Instruction, use: Operands) -> Step:
    """`bfe`: some bits, from a position on, with sign or without."""
    kind = instruction.opcode[-1]
    size, signed, bits = 8 * np.dtype(KINDS[kind]).itemsize, kind[0] == "s", KINDS["u" + kind[1:]]

    def function(x: Any, position: Any, length: Any) -> Any:
        position, length = (each.astype(np.int64) & 255 for each in (position, length))
        top = np.minimum(position + length, size) - 1  # of the bits; the sign is there
        inside = np.where(position < size, x >> np.minimum(position, size - 1).astype(bits), bits(0))
        mask = np.where(length >= size, ~bits(0), (bits(1) << np.minimum(length, size - 1).astype(bits)) - bits(1))
        result = (inside & mask).astype(bits)
        if signed:
            negative = (x >> np.clip(top, 0, size - 1).astype(bits) & bits(1)).astype(bool) & (length > 0)
            kept = np.clip(top - position + 1, 0, size)
            ones = np.where(kept >= size, bits(0), ~bits(0) << np.minimum(kept, size - 1).astype(bits))
            result = np.where(negative, result | ones, result).astype(bits)
        return result

    return apply(use, instruction, function, ["b" + kind[1:], "u32", "u32"], "b" + kind[1:])


def _insert(instruction: Instruction, use: Operands) -> Step:
    """`bfi`: some bits of the first operand, put into the second."""
    kind = instruction.opcode[-1]
    size, bits = 8 * np.dtype(KINDS[kind]).itemsize, KINDS[kind]

    def function(x: Any, y: Any, position: Any, length: Any) -> Any:
        position, length = (each & np.uint32(255) for each in (position, length))
        mask = np.where(length >= size, ~bits(0), (bits(1) << np.minimum(length, size - 1).astype(bits)) - bits(1))
        at = np.minimum(position, size - 1).astype(bits)
        return np.where(position >= size, y, y & ~(mask << at) | (x & mask) << at).astype(bits)

    return apply(use, instruction, function, [kind, kind, "u32", "u32"], kind)


def _each_bit(x: Any) -> Any:
    """uint8 [threads, bits of x], the lowest first."""
    return np.unpackbits(np.ascontiguousarray(x)[:, None].view(np.uint8), axis=1, bitorder="little")


def _of_bits(function: Callable[[Any], Any], result: str | None) -> Callable[..., Step]:
    def build(instruction: Instruction, use: Operands) -> Step:
        kind = instruction.opcode[-1]
        kind = "b" + kind[1:]
        dtype = KINDS[result or kind]
        return apply(use, instruction, lambda x: function(_each_bit(x)).astype(dtype), [kind], result or kind)

    return build


def _reversed(bits: Any) -> Any:
    packed = np.packbits(bits[:, ::-1], axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(UNSIGNED[packed.shape[1]])[:, 0]


def _leading_zeros(bits: Any) -> Any:
    return np.where(bits.any(1), bits[:, ::-1].argmax(1), bits.shape[1])


def _permute(instruction: Instruction, use: Operands) -> Step:
    """`prmt`: four of eight bytes, each alone or its sign in all bits."""
    only(instruction, set())

    def function(x: Any, y: Any, choice: Any) -> Any:
        both = np.stack([x, y], axis=1).view(np.uint8)
        nibbles = choice[:, None] >> np.array([0, 4, 8, 12], np.uint32) & np.uint32(15)
        found = np.take_along_axis(both, (nibbles & np.uint32(7)).astype(np.int64), axis=1)
        if choice.max() & 0x8888:
            found = np.where(nibbles & np.uint32(8), np.where(found & 128, np.uint8(255), np.uint8(0)), found)
        return np.ascontiguousarray(found).view(np.uint32)[:, 0]

    if re.fullmatch(r"(0x[\da-f]+|\d+)U?", choice := instruction.operands[3]):
        value = int(choice.rstrip("U"), 0)
        order = [value >> 4 * j & 7 for j in range(4)]
        if not value & 0x8888:
            return apply(
                use, instruction,
                lambda x, y: np.stack([x, y], axis=1).view(np.uint8).take(order, axis=1).view(np.uint32)[:, 0],
                ["b32"] * 2, "b32",
            )  # fmt: skip
    return apply(use, instruction, function, ["b32"] * 3, "b32")


BITS: dict[str, Callable[[Instruction, Operands], Step]] = {
    "lop3": _logic3, "shl": _shift, "shr": _shift, "shf": _funnel, "bfe": _extract, "bfi": _insert, "prmt": _permute,
    "popc": _of_bits(lambda bits: bits.sum(1), "u32"), "clz": _of_bits(_leading_zeros, "u32"),
    "brev": _of_bits(_reversed, None),
}  # fmt: skip
