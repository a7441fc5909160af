"""Progress on stderr: bars on a terminal, a few plain lines elsewhere, nothing with --quiet."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bpc_cli.console import duration_text, note, shows_bars

if TYPE_CHECKING:
    from rich.progress import Progress


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
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("ETA"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True, markup=False, highlight=False, emoji=False),
        redirect_stdout=False,  # results stay on stdout
        speed_estimate_period=math.inf,  # methods differ in speed, so the last seconds say little about the rest
    )


BETWEEN = 60.0  # seconds between two lines of one stage


@dataclass
class _Stage:
    """When a stage began, what was done then, when its last line was printed, and whether its end was."""

    began: float
    first: float
    printed: float
    ended: bool = False


def progress_lines(
    say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[str, float, int | None, str], None]:
    """Give the function that is called after every step and says few of them.

    It says when a stage begins (a call with 0 done), when it ends, and at most once a minute how far it is. Its
    arguments are the name of the stage, what is done, the total (None: done is a share from 0 to 1), and the current
    work.
    """
    stages: dict[str, _Stage] = {}
    last = clock()

    def step(name: str, done: float, total: int | None, what: str) -> None:
        nonlocal last
        now, stage = clock(), stages.get(name)
        at_end = done >= (total or 1)
        if stage is None or (stage.ended and not at_end):
            # Steps that are done at the first call are those of an earlier run; a single one has just been done.
            earlier = bool(total) and done > 1
            began = now if earlier or not done else last
            stages[name] = stage = _Stage(began, done if earlier else 0, began if done else -math.inf)
        if at_end and not stage.ended:
            stage.ended = True
            if not total or total > stage.first:
                say(_end(name, stage, total, now))
        elif not at_end and now - stage.printed >= BETWEEN:
            say(_state(name, stage, done, total, what, now))
            stage.printed = now
        last = now

    return step


def _state(name: str, stage: _Stage, done: float, total: int | None, what: str, now: float) -> str:
    parts = []
    if (spent := now - stage.began) > 0:
        parts.append(duration_text(spent))
    if spent > 0 and done > stage.first:
        left = spent * ((total or 1) - done) / (done - stage.first)
        parts.append(f"about {duration_text(left)} left")
    times = f" ({', '.join(parts)})" if parts else ""
    reached = f"{done:,} of {total:,}" if total else f"{100 * done:.0f} %"
    return f"{name}: {reached}{times}{', ' if what else ''}{what}"


def _end(name: str, stage: _Stage, total: int | None, now: float) -> str:
    spent = duration_text(now - stage.began)
    if total is None:
        return f"{name}: done in {spent}"
    own = f"{total - stage.first:,} of " if stage.first else ""
    return f"{name}: done, {own}{total:,} in {spent}"


@dataclass
class StageTimes:
    """Seconds and finished steps by stage; the steps are those of this run, not those of an earlier one."""

    last: float  # when the last step ended
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)

    def add(self, stage: str, done: int = 1) -> None:
        """Count the time since the last call, and the steps since the first call with this stage."""
        now = self.clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.steps[stage] = done - self._first.setdefault(stage, done)
        self.last = now
