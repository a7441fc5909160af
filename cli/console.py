"""Printing: results on stdout, messages on stderr, and no control characters in either."""

import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.table import Table

    from bpc_cli.text_table import TextTable

__all__ = ["drop", "fail", "note", "print_json", "print_rows", "print_table", "print_text_table", "printable"]


def printable(text: object, keep: str = "") -> str:
    """Text from a file or a model without control characters, escape codes or direction marks, except `keep`."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def print_table(title: str, table: "Table") -> None:
    """A table below its title; the title may be wider than the table."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    console.print(title, style="bold")
    console.print(table)


def print_text_table(found: "TextTable") -> None:
    """A table of text below its title."""
    from rich.table import Table

    table = Table(*map(printable, found.columns))
    for row in found.rows:
        table.add_row(*map(printable, row))
    print_table(printable(found.title), table)


def print_rows(title: str, rows: dict[str, Any]) -> None:
    """A table of two columns, names and values."""
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, printable(value))
    print_table(title, table)


def print_json(value: Any) -> None:
    """One JSON document on stdout; JSON escapes control characters."""
    print(json.dumps(value, indent=2))


def note(message: str, dim: bool = False) -> None:
    """A message on stderr, beside the results; `dim` where a terminal can. Work goes on when nobody reads it."""
    text = printable(message)
    if dim and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\x1b[2m{text}\x1b[0m"
    try:
        print(text, file=sys.stderr)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Send a stream to nowhere: Python would try at exit to write again what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(message: str) -> NoReturn:
    """Raise the error that `command` prints in one line, before it exits with 1."""
    from bpc_artifacts.errors import BPCError

    raise BPCError(message)
