"""Matrix products, and the loads and stores that spread matrices over the threads of a warp.

A fragment is how a matrix lies in registers. With 32 lanes as 8 groups of 4, the lane 4 g + t holds of row g of every
8 x 4u block the u neighbours from column u t on, where u values fill a register of 32 bits (of 64 bits for float64).
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.operands import SHARED_AT, Operands, Step, store
from ptx.program import Fault, Instruction, listed
from ptx.rounding import from_half, from_tf32

__all__ = ["MATRICES", "numbers", "product_shape", "total"]


def numbers(bits: Any, kind: str) -> Any:
    """The values, a last axis longer, that registers [...] hold: float64, or float32 of integers, exact both."""
    bits = np.ascontiguousarray(bits)
    if kind in ("s8", "u8"):
        return bits.view(np.int8 if kind == "s8" else np.uint8).reshape(*bits.shape, 4).astype(np.float32)
    if kind in ("bf16", "f16"):
        return from_half(bits.view(np.uint16).reshape(*bits.shape, 2), kind).astype(np.float64)
    if kind == "tf32":
        return from_tf32(bits)[..., None].astype(np.float64)
    if kind == "f64":
        return bits.view(np.float64)[..., None]
    raise Fault(f"unknown product of {kind}")


def product_shape(instruction: Instruction) -> tuple[int, int, int]:
    (shape,) = (each for each in map(re.compile(r"m(\d+)n(\d+)k(\d+)$").match, instruction.opcode) if each)
    rows, columns, depth = map(int, shape.groups())
    return rows, columns, depth


def total(sums: Any, product: Any, saturates: bool) -> Any:
    """The sums, int32, float32 or float64, plus a product, in their type."""
    if sums.dtype != np.int32:
        return (sums.astype(np.float64) + product).astype(sums.dtype)
    wide = sums.astype(np.int64) + product.astype(np.int64)
    return (np.clip(wide, -(2**31), 2**31 - 1) if saturates else wide).astype(np.int32)


def _fragments(bits: Any, rows: int, kind: str) -> Any:
    """Matrices [warps, 16 or 8, depth] of registers [registers, threads]: first down, then to the right."""
    count, threads = bits.shape
    down = rows // 8
    values = numbers(bits, kind).reshape(count // down, down, threads // 32, 8, 4, -1)
    return values.transpose(2, 1, 3, 0, 4, 5).reshape(threads // 32, rows, -1)


def _multiply(instruction: Instruction, use: Operands) -> Step:
    """`mma`: one product a warp."""
    (rows, columns, depth), parts = product_shape(instruction), instruction.opcode
    kind, other, result = parts[-3], parts[-2], parts[-1]
    if columns != 8 or "row" not in parts or "col" not in parts or result not in ("f32", "s32", "f64") or (
        unknown := set(parts[1:-4]) - {"sync", "aligned", "row", "col", "satfinite", f"m{rows}n{columns}k{depth}"}
    ):  # fmt: skip
        raise Fault("unknown product")
    del unknown, other
    held = "b64" if kind == "f64" else "b32"
    wide = {"f32": np.float32, "s32": np.int32, "f64": np.float64}[result]
    to, a, b, c = (listed(operand[1:-1]) for operand in instruction.operands)
    puts = [store(use.write(each, result)) for each in to]
    places = [[use.read(each, held) for each in operands] for operands in (a, b)]
    sums = [use.read(each, result) for each in c]
    down, warps = rows // 8, use.program.threads // 32
    saturates = "satfinite" in parts

    def step(block: Any, mask: Any) -> None:
        if mask is not None:
            raise Fault("a product without all threads")
        registers = block.registers
        left, right = (
            np.stack([registers[i] if turn is None else turn(registers[i]) for i, turn in each]) for each in places
        )
        # B is held as its transpose is: by columns of 8
        found = np.matmul(_fragments(left, rows, kind), _fragments(right, 8, kind).transpose(0, 2, 1))
        found = found.reshape(warps, down, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(2 * down, -1)
        before = np.stack([registers[i] if turn is None else turn(registers[i]) for i, turn in sums])
        after = total(before.astype(wide, copy=False), found, saturates)
        for put, value in zip(puts, after, strict=True):
            put(registers, None, value)

    return step


def _tiles(instruction: Instruction) -> tuple[int, bool]:
    parts = instruction.opcode
    if "m8n8" not in parts or parts[-1] != "b16":
        raise Fault("unknown matrix")
    (count,) = (int(part[1]) for part in parts if re.fullmatch(r"x[124]", part))
    return count, "trans" in parts


def _rows(address: Any, tile: int) -> Any:
    """The addresses of the 8 rows of a tile, which 8 lanes hold: [warps, 8]."""
    rows = address.reshape(-1, 32)[:, 8 * tile : 8 * tile + 8] - SHARED_AT
    if (rows % 16).any():
        raise Fault("a row of a matrix, misaligned")
    return rows


def _load_tiles(instruction: Instruction, use: Operands) -> Step:
    """`ldmatrix`: tiles of 8 rows of 16 bytes, transposed if asked."""
    count, transposed = _tiles(instruction)
    puts = [store(use.write(each, "b32")) for each in listed(instruction.operands[0].strip("{}"))]
    if len(puts) != count:
        raise Fault("operands do not fit")
    address = use.address(instruction.operands[1])

    def step(block: Any, mask: Any) -> None:
        if mask is not None and (mask.reshape(-1, 32).any(1) != mask.reshape(-1, 32).all(1)).any():
            raise Fault("a part of a warp loads a matrix")
        at, warps = address(block.registers), len(use.warp) // 32
        active = np.arange(warps) if mask is None else np.nonzero(mask.reshape(-1, 32)[:, 0])[0]
        stamps = np.repeat(block.clock.stamps[active * 32], 8)
        for tile, put in enumerate(puts):
            rows = _rows(at, tile)[active].ravel()
            words = np.zeros((warps, 8, 4), np.uint32)
            words[active] = block.shared.load(rows, 4, 4, stamps).reshape(-1, 8, 4)
            if transposed:
                words = np.ascontiguousarray(words.view(np.uint16).transpose(0, 2, 1)).view(np.uint32)
            put(block.registers, mask, words.reshape(-1))

    return step


def _store_tiles(instruction: Instruction, use: Operands) -> Step:
    """`stmatrix`, the opposite."""
    count, transposed = _tiles(instruction)
    reads = [use.read(each, "b32") for each in listed(instruction.operands[1].strip("{}"))]
    if len(reads) != count:
        raise Fault("operands do not fit")
    address = use.address(instruction.operands[0])

    def step(block: Any, mask: Any) -> None:
        if mask is not None:
            raise Fault("a store of a matrix without all threads")
        registers = block.registers
        at, stamps = address(registers), np.repeat(block.clock.stamps[::32], 8)
        for tile, (place, turn) in enumerate(reads):
            words = registers[place] if turn is None else turn(registers[place])
            words = np.ascontiguousarray(words).reshape(-1, 8, 4)
            if transposed:
                words = np.ascontiguousarray(words.view(np.uint16).transpose(0, 2, 1)).view(np.uint32)
            block.shared.store(_rows(at, tile).ravel(), words.reshape(-1, 4), stamps)

    return step


MATRICES: dict[str, Callable[[Instruction, Operands], Step]] = {
    "mma": _multiply, "ldmatrix": _load_tiles, "stmatrix": _store_tiles,
}  # fmt: skip
