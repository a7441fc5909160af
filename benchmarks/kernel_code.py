"""The machine code of a kernel (SASS): its instructions with their scheduling, its loops, and how often these run.

How often a loop runs comes from Triton's own form of the kernel (TTIR) and the arguments of the launch. The bounds
are computed from constants, arguments and program ids, which are known. Where a kernel loads an integer, it is taken
to be `loaded`: the lengths of the rows are what kernels load and loop over. The first program stands for all. Loops
`while` have no bounds: `RULES` says how often they run.
"""

import operator
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import triton

__all__ = ["RULES", "Code", "Instruction", "Loop", "Span", "code", "loops", "ptx_loops", "usage"]

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# An instruction, and the upper half of its bits, which hold what the compiler tells the scheduler.
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]+ \*/\s+/\* 0x([0-9a-f]+) \*/")
BARRIERS = 6  # that a thread has to wait for results of unknown latency
COUNTED = {  # by the beginning of an instruction
    "barrier": ("BAR.",), "shuffle": ("SHFL", "REDUX"),
    # At half the rate of others (CUDA C++ Programming Guide, throughput of instructions, 8.0 and 9.0).
    "half": (
        "IADD3", "LOP3", "ISETP", "SEL", "SHF", "PRMT", "IMNMX", "VIMNMX", "LEA", "FSETP", "FMNMX", "FSEL", "PLOP3",
        "ICMP", "IABS", "BMSK", "SGXT", "VIADD",
    ),
}  # fmt: skip
MOVES = ("LDG.", "LD.", "STG", "ST.", "LDGSTS", "ATOMG", "RED.")  # global memory
SIZES = {"128": 16, "64": 8, "U16": 2, "U8": 1, "S8": 1}  # bytes of a lane, in the name of what moves; else 4
# The same operations in PTX and in SASS: where a loop of SASS has more of them, the assembler has unrolled it.
PTX_ANCHORS = re.compile(
    r"^\s*(?:@!?%\w+\s+)?(?:shfl\.|redux\.|bar\.sync|barrier\.|ld\.global|st\.global|cp\.async\.c[ag]|(?:wg)?mma\.|ex2)"
)
SASS_ANCHORS = re.compile(r"(?:@!?U?P\w+\s+)?(?:SHFL|REDUX|BAR\.|LDG|STG|HMMA|IMMA|QMMA|DMMA|HGMMA|IGMMA|MUFU\.EX2)")


@dataclass
class Span:
    """Instructions from `first` to `last`: a loop, or the whole kernel."""

    first: int
    last: int
    anchors: int = 0  # operations by which a loop of PTX and of SASS are compared
    inner: list["Span"] = field(default_factory=list)
    trips: float = 1
    source: object = None  # the loop in the source that it comes from

    def holds(self, place: int) -> bool:
        return self.first <= place <= self.last

    def own(self) -> list[int]:
        """The places that are in no inner loop."""
        return [
            place for place in range(self.first, self.last + 1) if not any(inner.holds(place) for inner in self.inner)
        ]


class Instruction(NamedTuple):
    """One instruction, and how it is scheduled: the layout of these bits is the same from Volta to Blackwell."""

    text: str  # without its predicate
    stall: int  # clocks until the next
    sets: tuple[int, ...]  # barriers that are open until its result is there
    reads: tuple[int, ...]  # barriers that are open until its operands are read
    waits: tuple[int, ...]  # barriers that it waits for

    @property
    def name(self) -> str:
        return self.text.split(" ")[0]


@dataclass
class Code:
    """The instructions of a kernel."""

    instructions: list[Instruction]
    whole: Span

    def executed(self, span: Span | None = None) -> Counter[str]:
        """How often a warp executes each kind of instruction, in all loops."""
        span = span or self.whole
        counts: Counter[str] = Counter()
        for inner in span.inner:
            for kind, count in self.executed(inner).items():
                counts[kind] += inner.trips * count  # type: ignore[assignment]
        ahead = any(self.instructions[place].name.startswith("LDGSTS") for each in span.inner for place in each.own())
        for place in span.own():
            name = self.instructions[place].name
            counts["all"] += 1
            for kind, beginnings in COUNTED.items():
                counts[kind] += name.startswith(beginnings)
            # Copies ahead of a loop that copies are those that its last rounds leave out.
            if name.startswith(MOVES) and not (ahead and name.startswith("LDGSTS")):
                counts["bytes"] += next((size for word, size in SIZES.items() if word in name.split(".")), 4)
        return counts


def _listing(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOL, option, file.name], capture_output=True, text=True, check=True).stdout


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _listing("-res-usage", cubin))
    assert found is not None
    return int(found[1]), int(found[2])


def code(cubin: bytes) -> Code:
    """The instructions up to the last EXIT (behind it are the rare paths of divisions and roots), and their loops."""
    listed = INSTRUCTION.findall(_listing("-sass", cubin))
    texts = [text for _, text, _ in listed]
    places = {address.lstrip("0"): place for place, (address, *_) in enumerate(listed)}
    last = max(place for place, text in enumerate(texts) if text == "EXIT")
    whole = _nested(texts[: last + 1], re.compile(r".*\bBRA\b.* 0x([0-9a-f]+)$"), places, SASS_ANCHORS)
    return Code([_scheduled(text, int(bits, 16)) for _, text, bits in listed], whole)


def _scheduled(text: str, bits: int) -> Instruction:
    sets, reads = (tuple(b for b in (bits >> at & 7,) if b < BARRIERS) for at in (46, 49))
    waits = tuple(barrier for barrier in range(BARRIERS) if bits >> 52 + barrier & 1)
    return Instruction(re.sub(r"^@!?U?P\w+\s+", "", text), max(1, bits >> 41 & 15), sets, reads, waits)


def ptx_loops(ptx: str) -> Span:
    """The loops of PTX."""
    lines = ptx.splitlines()
    labels = {found[1]: place for place, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    return _nested(lines, re.compile(r".*\bbra(?:\.uni)?\s+(\$\w+);"), labels, PTX_ANCHORS)


def _nested(lines: list[str], jump: re.Pattern[str], labels: Mapping[str, int], anchors: re.Pattern[str]) -> Span:
    """The loops of jumps back, each within the smallest that holds it."""
    ends: dict[int, int] = {}
    for place, line in enumerate(lines):
        if (target := jump.match(line)) is not None and (to := labels[target[1]]) < place:
            ends[to] = place
    whole = Span(0, len(lines) - 1)
    for first, end in sorted(ends.items()):
        outer = whole
        while (deeper := next((each for each in outer.inner if each.holds(first)), None)) is not None:
            outer = deeper
        outer.inner.append(Span(first, end))
    _anchored(whole, lines, anchors)
    return whole


def _anchored(span: Span, lines: list[str], anchors: re.Pattern[str]) -> None:
    for inner in span.inner:
        _anchored(inner, lines, anchors)
    span.anchors = sum(anchors.match(lines[place]) is not None for place in span.own())


# Trips of loops whose bounds depend on data, by the kernel's name and the loop's place; from the compiled constants.
RULES: dict[tuple[str, int], Callable[[Mapping[str, Any]], int]] = {
    ("compact_kernel", 1): lambda constants: 0,  # fills what is behind the last token: of a full list, nothing
    ("guard_kernel", 0): lambda constants: 1,  # stops at the first tokens of the safeguard's list
}

ASSIGNED = re.compile(r"\s*%([\w.$-]+)(?::\d+)? = (.*)")
NAME = re.compile(r"%([\w.$-]+(?:#\d+)?)")
FOR = re.compile(r"scf\.for (?:unsigned )?%([\w.$-]+) = %([\w.$#-]+) to %([\w.$#-]+) step %([\w.$#-]+)")
TWO: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul,
    "divsi": lambda a, b: a // b if b else 0, "divui": lambda a, b: a // b if b else 0,
    "ceildivsi": lambda a, b: -(-a // b) if b else 0, "remsi": lambda a, b: a % b if b else 0,
    "remui": lambda a, b: a % b if b else 0, "minsi": min, "minui": min, "maxsi": max, "maxui": max,
    "shli": operator.lshift, "shrsi": operator.rshift, "shrui": operator.rshift,
    "andi": operator.and_, "ori": operator.or_, "xori": operator.xor,
}  # fmt: skip


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
    known[index] = (first + last) // 2  # loops in this one may depend on it
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
    words = expression.split()
    operation = words[0]
    operands = [known.get(each) for each in NAME.findall(expression)]
    value: int | None = None
    if operation == "arith.constant":
        if words[1] in ("true", "false"):
            value = int(words[1] == "true")
        elif re.fullmatch(r"-?\d+", words[1]):
            value = int(words[1])
        if value is not None:
            constants.add(name)
    elif operation == "tt.get_program_id":
        value = 0
    elif operation == "tt.get_num_programs":
        value = grid["xyz".index(words[1])]
    elif operation == "tt.load" and re.search(r"!tt\.ptr<i(16|32|64)>", expression):
        value = loaded
    elif operation in ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast"):
        value = operands[0]
    elif operation == "arith.cmpi" and None not in operands:
        compare = getattr(operator, words[1].rstrip(",").lstrip("su"))
        value = int(compare(operands[0], operands[1]))
    elif operation == "arith.select" and operands[0] is not None:
        value = operands[1] if operands[0] else operands[2]
    elif (two := TWO.get(operation.rpartition(".")[2])) and len(operands) == 2 and None not in operands:
        value = two(operands[0], operands[1])  # type: ignore[arg-type]
    if value is not None:
        known[name] = value
