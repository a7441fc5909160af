"""Markdown from values that a file may have chosen: text that cannot leave its place."""

from collections.abc import Iterable, Sequence

__all__ = ["code", "table"]


def code(text: object) -> str:
    """Return text as a code span on one line, also inside a table."""
    safe = "".join(c if c.isprintable() and c not in "`|" else " " for c in str(text)).strip()
    return f"`{safe or ' '}`"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; its cells are trusted."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
