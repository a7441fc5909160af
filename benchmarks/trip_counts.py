"""How often each loop of a compiled kernel runs, from Triton's own form of it (TTIR) and the arguments of the launch.

The bounds of a loop are computed from constants, arguments and program ids, which are known. Where a kernel loads an
integer, it is taken to be `loaded`: the lengths of the rows are what kernels load and loop over. The first program
stands for all. Loops `while` have no bounds: `RULES` says how often they run.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RULES", "Loop", "loops"]

# Trips of loops whose bounds depend on data, by the kernel's name and the loop's place; from the compiled constants.
RULES: dict[tuple[str, int], Callable[[Mapping[str, Any]], int]] = {
    ("compact_kernel", 1): lambda constants: 0,  # fills what is behind the last token: of a full list, nothing
    ("guard_kernel", 0): lambda constants: 1,  # stops at the first tokens of the safeguard's list
}

ASSIGNED = re.compile(r"\s*%([\w.$-]+)(?::\d+)? = (.*)")
NAME = re.compile(r"%([\w.$-]+(?:#\d+)?)")
FOR = re.compile(r"scf\.for (?:unsigned )?%([\w.$-]+) = %([\w.$#-]+) to %([\w.$#-]+) step %([\w.$#-]+)")
TWO: dict[str, Callable[[int, int], int]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": lambda a, b: a // b if b else 0,
    "divui": lambda a, b: a // b if b else 0,
    "ceildivsi": lambda a, b: -(-a // b) if b else 0,
    "remsi": lambda a, b: a % b if b else 0,
    "remui": lambda a, b: a % b if b else 0,
    "minsi": min,
    "minui": min,
    "maxsi": max,
    "maxui": max,
    "shli": lambda a, b: a << b,
    "shrsi": lambda a, b: a >> b,
    "shrui": lambda a, b: a >> b,
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b,
}
COMPARED: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@dataclass
class Loop:
    """A loop that runs at least twice, and the loops in it."""

    trips: int | None
    constant: bool  # whether its bounds are compiled in
    inner: list["Loop"] = field(default_factory=list)


def loops(ttir: str, arguments: list[Any], grid: tuple[int, int, int], loaded: int) -> list[Loop]:
    """The loops of a kernel, outermost first; `arguments` as `ptx.driver.Launch` has them."""
    names = re.findall(r"%([\w.$-]+): ", next(line for line in ttir.splitlines() if "tt.func public" in line))
    known: dict[str, int] = {n: a for n, a in zip(names, arguments, strict=True) if isinstance(a, int)}
    constants: set[str] = set()
    top = Loop(1, True)
    regions: list[Loop] = [top]  # the loop that each open region belongs to
    for line in ttir.splitlines():
        text = line.split(" loc(")[0].strip()
        if text.startswith("}"):
            regions.pop()
        if (found := FOR.search(text)) is not None:
            begins = [_trips(found, known, constants)]
        elif "scf.while" in text:
            begins = [Loop(None, False)]
        else:
            begins = []
            _learn(text, known, constants, grid, loaded)
        for each in begins:
            regions[-1].inner.append(each)
        if text.endswith("{"):
            regions.append(begins[0] if begins else regions[-1])
    return _without_single(top.inner)


def _trips(found: re.Match[str], known: dict[str, int], constants: set[str]) -> Loop:
    index, *bounds = found.groups()
    values = [known.get(bound) for bound in bounds]
    first, last, step = values
    if first is None or last is None or not step:
        return Loop(None, False)
    known[index] = first
    return Loop(max(0, -(-(last - first) // step)), all(bound in constants for bound in bounds))


def _without_single(found: list[Loop]) -> list[Loop]:
    """Without loops that run once, which the compiler removes; the loops in them stay."""
    kept = []
    for loop in found:
        loop.inner = _without_single(loop.inner)
        kept += loop.inner if loop.trips == 1 and loop.constant else [loop]
    return kept


def _learn(text: str, known: dict[str, int], constants: set[str], grid: tuple[int, int, int], loaded: int) -> None:
    """Remember the value of an integer that a line computes."""
    if (assigned := ASSIGNED.match(text)) is None or "tensor<" in text:
        return
    name, expression = assigned.groups()
    operation = expression.split()[0]
    operands = [known.get(each) for each in NAME.findall(expression)]
    kind, _, last = operation.removeprefix("arith.").rpartition(".")
    kind = kind or last
    if operation == "arith.constant":
        value = expression.split()[1]
        if value in ("true", "false") or re.fullmatch(r"-?\d+", value):
            known[name] = int(value) if value not in ("true", "false") else int(value == "true")
            constants.add(name)
    elif operation == "tt.get_program_id":
        known[name] = 0
    elif operation == "tt.get_num_programs":
        known[name] = grid["xyz".index(expression.split()[1])]
    elif operation == "tt.load" and re.search(r"!tt\.ptr<i(16|32|64)>", expression):
        known[name] = loaded
    elif operation in ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast") and operands[0] is not None:
        known[name] = operands[0]
    elif operation == "arith.cmpi" and None not in operands:
        compare = COMPARED[expression.split()[1].rstrip(",").removeprefix("s").removeprefix("u")]
        known[name] = int(compare(operands[0], operands[1]))  # type: ignore[arg-type]
    elif operation == "arith.select" and operands[0] is not None:
        chosen = operands[1] if operands[0] else operands[2]
        if chosen is not None:
            known[name] = chosen
    elif kind in TWO and len(operands) == 2 and None not in operands:
        known[name] = TWO[kind](operands[0], operands[1])  # type: ignore[arg-type]
