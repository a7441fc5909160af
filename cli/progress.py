"""Progress bars on stderr, shown on a terminal unless --quiet is given."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress_bar", "shows_progress", "stage_bars"]


def shows_progress(quiet: bool) -> bool:
    """Whether messages about progress are printed."""
    return not quiet and sys.stderr.isatty()


@contextmanager
def progress_bar(description: str, quiet: bool) -> Iterator[Callable[[float, str], None]]:
    """One bar; gives the function that takes the share that is done and what is being done."""
    if not shows_progress(quiet):
        yield lambda share, what: None
        return
    with _bars() as bars:
        bar = bars.add_task(description, total=1.0)
        yield lambda share, what: bars.update(bar, completed=share, description=what)


@contextmanager
def stage_bars(stages: Mapping[str, str], quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar per stage, which appears when its stage begins; gives the function that takes stage, done and total."""
    if not shows_progress(quiet):
        yield lambda stage, done, total: None
        return
    with _bars() as bars:
        tasks = {stage: bars.add_task(text, start=False, total=None, visible=False) for stage, text in stages.items()}

        def show(stage: str, done: int, total: int) -> None:
            bars.start_task(tasks[stage])
            bars.update(tasks[stage], completed=done, total=total, visible=True)

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
