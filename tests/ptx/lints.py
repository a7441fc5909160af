"""What a compiled kernel should not contain, found in the compiler's own forms of it (TTIR and TTGIR)."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["found_in", "masked_reordered_histograms", "narrow_products"]


class Value(NamedTuple):
    """What makes a value: an operation of other values, or the start of a loop's own."""

    operation: str
    operands: tuple[str, ...]
    type: str
    place: str  # "score.py:174"
    line: str


def found_in(kernel: Any) -> list[str]:
    """Of a compiled kernel, as the driver's `launch` gets it: what each lint finds."""
    name = kernel.metadata.name
    texts = masked_reordered_histograms(kernel.asm["ttgir"]), narrow_products(kernel.asm["ttir"])
    return [f"{name}, {each}" for each in (*texts[0], *texts[1])]


def masked_reordered_histograms(text: str) -> list[str]:
    """Histograms with a mask whose values or mask come from a reshape that may change the order of elements.

    Value and mask would each be reordered in a way of its own, so that the mask meets other values.
    """
    values = _values(text)
    found = []
    for value in values.values():
        if value.operation == "tt.histogram" and len(value.operands) > 1:
            sources = [each for operand in value.operands for each in _sources(values, operand)]
            if any(each.operation == "tt.reshape" and "allow_reorder" in each.line for each in sources):
                found.append(f"{value.place}: a histogram with a mask, of values in any order")
    return found


def narrow_products(text: str) -> list[str]:
    """Products of 32 bits of two values of the run time that lead to an address: beyond 2^31 they overflow.

    A constant or a range, which the kernel's shape bounds, may be a factor.
    """
    values = _values(text)
    found = set()
    for value in values.values():
        if value.operation == "tt.addptr":
            for each in _sources(values, value.operands[1]):
                narrow = re.search(r"(^|x)i32>?$", each.type)
                if each.operation == "arith.muli" and narrow and not any(_fixed(values, x) for x in each.operands):
                    found.add(f"{each.place}: a product of 32 bits in an address")
    return sorted(found)


def _values(text: str) -> dict[str, Value]:
    """By name. One kernel: names of values in nested regions are distinct."""
    places = dict(re.findall(r"^(#loc\w*) = loc\((.*)\)$", text, re.M))
    values: dict[str, Value] = {}
    for line in text.split("\n"):
        for own, start in re.findall(r"(%[\w.]+) = (%[\w.]+)[,)]", line.partition("iter_args")[2]):
            values[own] = Value("start", (start,), "", "", line)
        match = re.match(r"\s*(%[\w.]+)(?::\d+)? = \"?([\w.]+)\"?(.*)$", line)
        if match is None:
            continue
        name, operation, rest = match.groups()
        place = re.search(r"loc\((#loc\w*)\)\s*$", rest)
        rest = re.sub(r"\s*loc\(#loc\w*\)\s*$", "", rest)
        operands, _, kind = rest.partition(" : ")
        kind = re.sub(r"\s*[{(].*$", "", kind.rsplit("->")[-1]).strip() if "->" in kind else kind.strip()
        if operation == "tt.addptr":
            kind = kind.rsplit(", ", 1)[-1]
        names = tuple(re.findall(r"%[\w.]+", operands))
        where = _place(places, place.group(1)) if place else "?"
        values[name] = Value(operation, names, re.sub(r", #.*>", ">", kind), where, line)
    return values


def _place(places: dict[str, str], name: str) -> str:
    """The innermost file and line of a location."""
    for _ in range(20):
        text = places.get(name, "")
        if direct := re.search(r'"([^"]*)":(\d+)', text):
            return f"{direct.group(1).rsplit('/', 1)[-1]}:{direct.group(2)}"
        if (inner := re.search(r"#loc\w*", text)) is None:
            return "?"
        name = inner.group()
    return "?"


def _sources(values: dict[str, Value], name: str) -> Iterator[Value]:
    """What a value is computed from, without what was loaded."""
    seen, pending = set(), [name]
    while pending:
        name = pending.pop()
        value = values.get(name)
        if value is None or name in seen:
            continue
        seen.add(name)
        yield value
        if value.operation not in ("tt.load", "tt.atomic_rmw", "tt.atomic_cas", "scf.for", "scf.while", "scf.if"):
            pending += value.operands


def _fixed(values: dict[str, Value], name: str) -> bool:
    """Whether a value is known when the kernel is compiled."""
    value = values.get(name)
    if value is None:
        return False
    if value.operation in ("arith.constant", "tt.make_range"):
        return True
    if value.operation in ("tt.load", "tt.get_program_id") or not value.operands:
        return False
    return all(_fixed(values, each) for each in value.operands)
