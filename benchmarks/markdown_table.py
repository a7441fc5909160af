"""Tables in Markdown, and the cells that several of them share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Results", "filled", "link", "percent", "table"]

Results = Mapping[str, Any]  # the committed results by file name, without its suffix


def table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """One line of heads, one line per row."""
    lines = [_line(heads), "|---" * len(heads) + "|", *map(_line, rows)]
    return "\n".join(lines)


def filled(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table without the columns in which no row has anything: older results lack a figure."""
    places = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    return table([heads[place] for place in places], [[row[place] for place in places] for row in rows])


def percent(share: float, digits: int = 1) -> str:
    """A share as a number of percent, without the sign; halves are rounded up, as readers expect."""
    return f"{math.floor(100 * share * 10**digits + 0.5) / 10**digits:.{digits}f}"


def link(name: str) -> str:
    """A link to a result, for a page in docs/."""
    return f"[{name}.json](../benchmarks/results/{name}.json)"


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
