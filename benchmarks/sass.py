"""What the machine code of a kernel (SASS) executes: its loops, and the instructions that make a warp wait."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import triton

__all__ = ["KINDS", "Code", "Span", "code", "ptx_loops", "usage"]

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)(?:\.(64|128))?\b")
WORDS = {"64": 2, "96": 3, "128": 4}  # registers that a wide load writes
# Instructions whose result takes long, by what they wait for; a warp waits once for all that it began before.
SLOW = {
    "LDG": "global", "LD": "global", "ATOMG": "global", "ATOM": "global", "LDS": "shared", "LDSM": "shared",
    "ATOMS": "shared", "SHFL": "shuffle", "MUFU": "shared", "S2R": "shuffle",
    "HMMA": "product", "IMMA": "product", "QMMA": "product", "DMMA": "product", "HGMMA": "product", "IGMMA": "product",
}  # fmt: skip
# What is counted, by the beginning of an instruction.
KINDS = {
    "barrier": ("BAR.",), "shuffle": ("SHFL", "REDUX"), "global": ("LDG", "LD.", "STG", "ST.", "LDGSTS"),
    "shared": ("LDS", "STS"), "atomic": ("ATOM", "RED."), "product": ("HMMA", "IMMA", "QMMA", "DMMA", "HGMMA", "IGMMA"),
}  # fmt: skip
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

    def holds(self, place: int) -> bool:
        return self.first <= place <= self.last


@dataclass
class Code:
    """The instructions of a kernel."""

    instructions: list[str]
    whole: Span

    def executed(self, span: Span | None = None) -> tuple[Counter[str], Counter[str]]:
        """How often a warp executes each kind of instruction, and waits for each kind of result, in all loops."""
        span = span or self.whole
        counts, waits = self._own(span)
        for inner in span.inner:
            more, longer = self.executed(inner)
            for total, part in ((counts, more), (waits, longer)):
                for kind, count in part.items():
                    total[kind] += inner.trips * count  # type: ignore[assignment]
        return counts, waits

    def _own(self, span: Span) -> tuple[Counter[str], Counter[str]]:
        """Of one pass through a span without the loops in it."""
        counts: Counter[str] = Counter()
        waits: Counter[str] = Counter()
        pending: dict[int, str] = {}
        for place in range(span.first, span.last + 1):
            if any(inner.holds(place) for inner in span.inner):
                continue
            text = re.sub(r"^@!?U?P\w+\s+", "", self.instructions[place])
            name = text.split(" ")[0]
            counts["all"] += 1
            for kind, beginnings in KINDS.items():
                counts[kind] += name.startswith(beginnings)
            if kind_of_memory(name):
                counts["bytes"] += _bytes(name)
            asked = REGISTER.findall(text)
            slow = SLOW.get(name.split(".")[0])
            read = asked[1:] if slow and slow != "product" else asked
            needed = {pending[int(number)] for number, _ in read if int(number) in pending}
            for kind in needed:  # all that began before are over by then
                waits[kind] += 1
                pending = {register: other for register, other in pending.items() if other != kind}
            waits["shuffle"] += name.startswith("REDUX")  # its result is in a register of all lanes
            if name.startswith("DEPBAR") and "SB0" in text:  # waits for cp.async, or for all but the latest of them
                waits["global"] += 1
            if slow and asked:
                width = next((WORDS[word] for word in name.split(".") if word in WORDS), 1)
                pending |= dict.fromkeys(range(int(asked[0][0]), int(asked[0][0]) + width), slow)
        return counts, waits


def kind_of_memory(name: str) -> bool:
    """Whether an instruction reads or writes global memory."""
    return name.startswith(("LDG", "LD.", "STG", "ST.", "RED", "ATOMG", "ATOM."))


def _bytes(name: str) -> int:
    """Bytes of one lane."""
    words = name.split(".")
    return next((size for word, size in (("128", 16), ("64", 8), ("U16", 2), ("U8", 1), ("S8", 1)) if word in words), 4)


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
    places = {int(address, 16): place for place, (address, _) in enumerate(listed)}
    texts = [text for _, text in listed]
    last = max(place for place, text in enumerate(texts) if re.fullmatch(r"EXIT", text))
    jumps = []
    for place, text in enumerate(texts[:last]):
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text)
        if target is not None and (to := places[int(target[1], 16)]) < place:
            jumps.append((to, place))
    whole = _nested(last, jumps)
    _anchored(whole, texts, SASS_ANCHORS)
    return Code(texts, whole)


def ptx_loops(ptx: str) -> Span:
    """The loops of PTX."""
    lines = ptx.splitlines()
    labels = {found[1]: place for place, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    jumps = []
    for place, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if target is not None and (to := labels[target[1]]) < place:
            jumps.append((to, place))
    whole = _nested(len(lines) - 1, jumps)
    _anchored(whole, lines, PTX_ANCHORS)
    return whole


def _nested(last: int, jumps: Iterable[tuple[int, int]]) -> Span:
    """The loops of jumps back, each within the smallest that holds it."""
    ends: dict[int, int] = {}
    for first, end in jumps:
        ends[first] = max(end, ends.get(first, 0))
    whole = Span(0, last)
    for first, end in sorted(ends.items()):
        outer = whole
        while (deeper := next((each for each in outer.inner if each.holds(first)), None)) is not None:
            outer = deeper
        outer.inner.append(Span(first, end))
    return whole


def _anchored(span: Span, lines: list[str], anchors: re.Pattern[str]) -> None:
    for inner in span.inner:
        _anchored(inner, lines, anchors)
    span.anchors = sum(
        anchors.match(lines[place]) is not None
        for place in range(span.first, span.last + 1)
        if not any(inner.holds(place) for inner in span.inner)
    )
