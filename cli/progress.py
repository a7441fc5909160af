"""Progress on stderr: bars on a terminal, a few plain lines elsewhere, nothing with --quiet."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bpc_cli.console import duration_text, note, shows_bars

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["StageTimes", "progress_bar", "progress_lines", "stage_bars", "working"]


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


BETWEEN = 60.0  # seconds between two lines of one stage


@dataclass(frozen=True)
class _Pace:
    """When a stage began, what was done then, and when its last line was printed."""

    began: float
    first: float
    printed: float


def progress_lines(
    say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[str, float, int | None, str], None]:
    """Give the function that is called after every step and says few of them.

    It says when a stage begins (a call with 0 done), when it ends, and at most once a minute how far it is. Its
    arguments are the name of the stage, what is done, the total (None: done is a share from 0 to 1), and the current
    work.
    """
    paces: dict[str, _Pace] = {}
    ended: set[str] = set()
    last = clock()

    def step(name: str, done: float, total: int | None, what: str) -> None:
        nonlocal last
        now = clock()
        if name in ended and done >= (total or 1):  # its end was said
            return
        ended.discard(name)
        began = name not in paces and done == 0
        if began:
            paces[name] = _Pace(now, 0, now)
        elif name not in paces:  # it began when the stage before it ended, and this is its first step
            paces[name] = _Pace(last, done - 1 if total else 0, last)
        pace = paces[name]
        if done >= (total or 1):
            say(_end(name, pace, total, now))
            del paces[name]
            ended.add(name)
        elif began or now - pace.printed >= BETWEEN:
            say(_state(name, pace, done, total, what, now))
            paces[name] = replace(pace, printed=now)
        last = now

    return step


def _state(name: str, pace: _Pace, done: float, total: int | None, what: str, now: float) -> str:
    parts = []
    if (spent := now - pace.began) > 0:
        parts.append(duration_text(spent))
    if spent > 0 and done > pace.first:
        left = spent * ((total or 1) - done) / (done - pace.first)
        parts.append(f"about {duration_text(left)} left")
    times = f" ({', '.join(parts)})" if parts else ""
    reached = f"{done:,} of {total:,}" if total else f"{100 * done:.0f} %"
    return f"{name}: {reached}{times}{', ' if what else ''}{what}"


def _end(name: str, pace: _Pace, total: int | None, now: float) -> str:
    spent = duration_text(now - pace.began)
    if total is None:
        return f"{name}: done in {spent}"
    own = f"{total - pace.first:,} of " if pace.first else ""
    return f"{name}: done, {own}{total:,} in {spent}"


@dataclass
class StageTimes:
    """Seconds and finished steps by stage; the steps are those of this run, not those of an earlier one."""

    last: float  # when the last step ended
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    _reached: dict[str, int] = field(default_factory=dict)

    def add(self, stage: str, done: int = 1) -> None:
        """Count the time since the last call, and the steps since the last call with this stage."""
        now = self.clock()
        before = self._reached.get(stage, done)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.steps[stage] = self.steps.get(stage, 0) + done - before
        self._reached[stage] = done
        self.last = now
