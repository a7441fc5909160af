"""Progress without a terminal: a few plain lines, so that the log of a long run can be read."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bpc_cli.quantities import duration_text

__all__ = ["progress_lines"]

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
