"""Progress on stderr: bars on a terminal, a few plain lines elsewhere, nothing with --quiet."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bpc_cli.console import note
from bpc_cli.progress_lines import progress_lines
from bpc_cli.quantities import duration_text

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress_bar", "shows_bars", "stage_bars", "working"]


def shows_bars(quiet: bool) -> bool:
    """Whether progress is shown as bars."""
    return not quiet and sys.stderr.isatty()


@contextmanager
def working(what: str, quiet: bool) -> Iterator[None]:
    """A stage whose steps are not known: a line at its beginning and, without a terminal, one at its end."""
    began = time.monotonic()
    if not quiet:
        note(f"{what} ...")
    yield
    if not quiet and not shows_bars(quiet):
        note(f"{what}: done in {duration_text(time.monotonic() - began)}")


@contextmanager
def progress_bar(description: str, quiet: bool) -> Iterator[Callable[[float, str], None]]:
    """One stage; gives the function that takes the share that is done and what is being done."""
    with stage_bars({"": description}, quiet) as show:
        yield lambda share, what: show("", share, None, what)


@contextmanager
def stage_bars(stages: Mapping[str, str], quiet: bool) -> Iterator[Callable[[str, float, int | None, str], None]]:
    """Several stages; gives the function that takes a stage, what is done, the total and what is being done.

    A total of None means that what is done is a share from 0 to 1. A bar appears when its stage begins.
    """
    if quiet:
        yield lambda stage, done, total, what: None
    elif not shows_bars(quiet):
        step = progress_lines(note)
        yield lambda stage, done, total, what: step(stages[stage], done, total, what)
    else:
        with _bars() as bars:
            tasks = {
                stage: bars.add_task(text, start=False, total=None, visible=False) for stage, text in stages.items()
            }

            def show(stage: str, done: float, total: int | None, what: str) -> None:
                text = f"{stages[stage]}: {what}" if what else stages[stage]
                bars.start_task(tasks[stage])
                bars.update(tasks[stage], completed=done, total=total or 1, description=text, visible=True)

            yield show


def _bars() -> "Progress":
    """Bars with elapsed and remaining time that never interpret markup."""
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
