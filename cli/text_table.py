"""A table as text, for the terminal and for a page."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["TextTable"]


class TextTable(NamedTuple):
    """A title, the names of the columns, and rows with one text per column."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
