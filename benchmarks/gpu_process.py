"""Run the steps of a part in processes: a crash, a spoiled CUDA context or a hang costs one step, not the others."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_part import SPOILED

__all__ = ["Watched", "end", "last_line", "watch"]

SHARE = 0.4  # of a part's time: what a step may take while others wait
LOOK = 0.2  # seconds between two looks at a process

Seen = Callable[["Watched"], None]


@dataclass
class Watched:
    """What the processes of a part have measured so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    fault: str | None = None
    stopped: bool = False  # ran out of time


def watch(
    words: Sequence[str], file: Path, seconds: float, seen: Seen | None = None, *, own_group: bool = False
) -> Watched:
    """Run a command that calls `gpu_part.run_steps`, again behind a step that ended it, until all steps ran.

    Args:
        words: the command, which gets `--rows`, `--start` and `--seconds`.
        file: for the rows; its neighbours hold those of later processes, and the logs.
        seconds: for all processes together.
        seen: called again and again with what was measured so far.
        own_group: whether each process leads a group, which is killed as a whole.
    """
    ends, start, held = time.monotonic() + seconds, 0, Watched()
    while True:
        rows = file.with_name(f"{file.stem}-{start}.json")
        before = list(held.rows)

        def look(state: dict[str, Any], before: list[dict[str, Any]] = before) -> None:
            held.rows = before + state["rows"]
            if seen is not None:
                seen(held)

        left = ends - time.monotonic()
        more = ["--rows", str(rows), "--start", str(start), "--seconds", f"{max(left - 2, 1):.1f}"]
        why = _run([*words, *more], rows, left, SHARE * seconds, look, own_group=own_group)
        state = _read(rows)
        look(state)
        if why is None:
            return held
        held.stopped = time.monotonic() >= ends
        place = f" in: {state['what']}" if state["what"] else ""
        if held.stopped:
            held.fault = f"ran out of its {seconds:.0f} s{place}"
            return held
        if state["step"] is None:  # not even the imports worked
            held.fault = why
            return held
        if why != "spoiled":  # whose row says so itself
            held.rows = [*held.rows, {"what": state["what"], "failed": 1, "note": why}]
        start = state["step"] + 1
        if start >= state["of"]:
            return held


def _run(
    words: list[str],
    rows: Path,
    seconds: float,
    step: float,
    look: Callable[[dict[str, Any]], None],
    *,
    own_group: bool,
) -> str | None:
    """Run one process; return why it did not end by itself without an error."""
    log = rows.with_suffix(".log")
    rows.unlink(missing_ok=True)  # of an earlier command with the same folder
    began = changed = time.monotonic()
    place = None
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=own_group)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
                    break
                state, now = _read(rows), time.monotonic()
                look(state)
                if state["step"] != place:
                    place, changed = state["step"], now
                if now - began > seconds:
                    return "ran out of time"
                if now - changed > step and (state["step"] is None or state["step"] + 1 < state["of"]):
                    return f"stopped after {now - changed:.0f} s: {last_line(log.read_text(errors='replace'))}"
        finally:
            end(process, group=own_group)
    if process.returncode == SPOILED:
        return "spoiled"
    text = last_line(log.read_text(errors="replace"))
    return f"exit {process.returncode}: {text}" if process.returncode else None


def end(process: subprocess.Popen[bytes], *, group: bool) -> None:
    """Kill a process, if it runs, and with `group` those that it started."""
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _read(rows: Path) -> dict[str, Any]:
    try:
        return json.loads(rows.read_text())
    except FileNotFoundError:
        return {"rows": [], "step": None, "of": 0, "what": ""}


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
