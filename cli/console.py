"""What every command shares: results on stdout, the rest on stderr, one line for an error."""

import errno
import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

__all__ = [
    "bars",
    "command",
    "fail",
    "note",
    "print_json",
    "print_table",
    "printable",
    "quiet_libraries",
    "residual_title",
]

Result = TypeVar("Result")


def printable(text: object, keep: str = "") -> str:
    """Text from a file or a model without control characters, escape codes or direction marks, but for `keep`."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def bars() -> "Progress":
    """Progress on stderr with an ETA; never interprets markup."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=Console(stderr=True, markup=False, highlight=False, emoji=False),
        redirect_stdout=False,  # results stay on stdout
    )


def print_table(title: str, table: "Table") -> None:
    """A table under a title that is never squeezed to the table's width."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    console.print(title, style="bold")
    console.print(table)


def print_json(value: Any) -> None:
    """One JSON document on stdout; escapes keep control characters out."""
    print(json.dumps(value, indent=2))


def note(message: str) -> None:
    """A line for the user that is no result."""
    print(printable(message), file=sys.stderr)


def fail(message: str) -> NoReturn:
    """One line on stderr, exit 1."""
    note(f"Error: {message}")
    raise typer.Exit(1)


def command(function: Callable[..., Result]) -> Callable[..., Result]:
    """Turn exceptions into one line and an exit status; BPC_DEBUG=1 shows the traceback instead."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Result:
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()
            return result
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            note("Interrupted.")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader, `head` say, has had enough
            _drop_stdout()
            raise typer.Exit(0) from None
        except Exception as fault:
            if os.environ.get("BPC_DEBUG"):
                raise
            from bpc_artifacts.errors import BPCError

            if isinstance(fault, OSError) and fault.errno == errno.ENOSPC:
                _drop_stdout()
                fail(f"the output cannot be written: {fault.strerror}")
            if isinstance(fault, BPCError):
                fail(" ".join(str(fault).split()))
            if isinstance(fault, MemoryError) or type(fault).__name__ == "OutOfMemoryError":  # torch's, unimported
                fail("out of memory: try shorter texts, fewer at once, or --device cpu (--help names the options)")
            kind, text = type(fault).__name__, " ".join(str(fault).split())[:300]
            fail(f"unexpected {kind}: {text} (BPC_DEBUG=1 shows where; please report it)")

    return wrapped


def _drop_stdout() -> None:
    """What could not be written is not tried again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quiet_libraries(*, bars: bool = True, warnings: bool = True) -> None:
    """Our own warnings on stderr, one line each; those of the libraries below not. Before they are imported.

    Args:
        bars: whether downloads and loading may show progress; only ever on a terminal.
        warnings: whether ours are shown.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("Warning: %(message)s"))
    told: set[str] = set()
    # Once each: a command may open the same artifact again and again.
    handler.addFilter(lambda record: record.getMessage() not in told and not told.add(record.getMessage()))  # type: ignore[func-returns-value]
    ours = logging.getLogger("bpc_calib")
    ours.handlers = [handler]
    ours.setLevel(logging.WARNING if warnings else logging.ERROR)
    for library in ("TRANSFORMERS", "DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not (bars and sys.stderr.isatty()):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def residual_title(algorithm: dict[str, Any]) -> str:
    """What residuals are shares of; those under another title do not compare."""
    keys = "K - mean" if algorithm["centred"] else "K"
    metric = " in the query metric" if algorithm["metric"] else ""
    return f"Residual |{keys} - UP| / |{keys}|{metric}"
