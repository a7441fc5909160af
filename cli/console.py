"""Printing: results on stdout, messages on stderr, no control characters in either, and nothing from the libraries."""

import json
import logging
import math
import os
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.table import Table


class TextTable(NamedTuple):
    """A title, the names of the columns, and rows with one text per column."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def printable(text: object, keep: str = "") -> str:
    """Text from a file or a model without control characters, escape codes or direction marks, except `keep`."""

    def shows(c: str) -> bool:
        return c.isprintable() or c in keep or unicodedata.category(c) == "Zs"  # spaces of all widths

    return "".join(c if shows(c) else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def print_table(title: str, table: "Table") -> None:
    """A table below its title; the title may be wider than the table."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    console.print(title, style="bold")
    console.print(table)


def print_text_table(found: TextTable) -> None:
    """A table of text below its title; without names of columns it has no header."""
    from rich.table import Table

    table = Table(*map(printable, found.columns), show_header=bool(found.columns))
    for row in found.rows:
        table.add_row(*map(printable, row))
    print_table(printable(found.title), table)


def print_rows(title: str, rows: dict[str, Any]) -> None:
    """A table of two columns, names and values."""
    print_text_table(TextTable(title, (), list(rows.items())))


def print_json(value: Any) -> None:
    """One JSON document on stdout; JSON escapes control characters."""
    print(json.dumps(plain(value), indent=2))


def plain(value: Any) -> Any:
    """A value with null for numbers that JSON does not have: NaN and infinity."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def size_text(count: float) -> str:
    """Bytes, like 5.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration_text(seconds: float) -> str:
    """A time, like 3 min 20 s."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{seconds / 3600:.1f} h"


def rough_text(seconds: float) -> str:
    """A time that is forecast, like 40 min or 3 days."""
    for size, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.95 * size:
            return f"{seconds / size:.0f} {name}"
    return "a minute"


def heads_text(kv_heads: int, query_heads: int, head_dim: int) -> str:
    """The heads of a model, like 8 KV heads of 128, 32 query heads."""
    return f"{kv_heads} KV head{'s' * (kv_heads > 1)} of {head_dim}, {query_heads} query head{'s' * (query_heads > 1)}"


def shows_bars(quiet: bool) -> bool:
    """Whether progress is shown as bars."""
    return not quiet and sys.stderr.isatty()


def quiet_libraries(*, quiet: bool = False, warnings: bool = True) -> None:
    """Set up what libraries print. Call it before they are imported, because they read their settings then.

    Args:
        quiet: hide the progress of downloads and loading, which only a terminal shows.
        warnings: show BPC's own warnings.
    """
    ours = logging.getLogger("bpc_calib")
    ours.handlers = [_Notes()]
    ours.setLevel(logging.WARNING if warnings else logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)  # of libraries without a setting of their own, such as accelerate
    for library in ("TRANSFORMERS", "DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not shows_bars(quiet):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")


class _Notes(logging.Handler):
    """Notes each message once: a command may check the same artifact several times. Progress is no warning."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self.seen:
            self.seen.add(text)
            note(text[:1].upper() + text[1:] if getattr(record, "progress", False) else f"Warning: {text}")
