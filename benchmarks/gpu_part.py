"""A part of `gpu_suite.py`: its steps in order, in processes of their own.

A crash, a hang, or a fault that spoils the CUDA context of a process costs one step: a new process begins behind it. A
file says how far the steps are, and what they have measured.
"""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import replace

__all__ = [
    "Emit", "Limits", "Step", "Watched", "end", "free", "lacking", "last_line", "run_steps", "spoils", "watch",
]  # fmt: skip

SPARE = 1 << 30  # bytes for the CUDA context, the libraries' workspaces and what the allocator rounds up

SPOILED = 75  # exit code of a process whose CUDA context is spoiled
SPOILING = re.compile(
    "CUDA error|illegal memory access|illegal instruction|misaligned address|device-side assert|"
    "unspecified launch failure"
)

Emit = Callable[[dict[str, Any]], None]
Step = tuple[str, Callable[[Emit], None]]  # what it measures, and a function that emits rows


@dataclass(frozen=True)
class Limits:
    """What a part may use."""

    tiny: bool
    ends: float  # `time.monotonic()`
    folder: Path  # for the files of processes that it starts

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.ends - time.monotonic())


def spoils(text: object) -> bool:
    """Whether the text of an error means that the CUDA context of its process is spoiled."""
    return bool(SPOILING.search(str(text)))


def uses_cuda() -> bool:
    """Whether this process has a CUDA context; one that only starts others reports their faults and goes on."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def free() -> int:
    """Bytes that a tensor can still get on the GPU, or without one in main memory."""
    import torch

    from bpc_calib.bench.machine import available_memory

    if not torch.cuda.is_available():
        return available_memory(torch.device("cpu"))
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, available_memory(torch.device("cuda")) - SPARE)


def lacking(needed: int, available: int) -> str | None:
    """Why there is too little memory; None: there is enough."""
    if needed <= available:
        return None
    return f"not measured: it needs {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free"


def run_steps(steps: Sequence[Step], file: Path, start: int) -> None:
    """Run steps and write the file before each of them and after each row.

    Raises:
        SystemExit: a step spoiled the CUDA context.
    """
    state: dict[str, Any] = {"rows": [], "step": start, "of": len(steps), "what": ""}

    def emit(row: dict[str, Any]) -> None:
        held = state["rows"]
        if held and held[-1]["what"] == row["what"] and held[-1].get("tokens") == row.get("tokens"):
            held.pop()  # a newer count replaces it
        held.append(row)
        replace(file, json.dumps(state))
        if spoils(row.get("note", "")) and uses_cuda():
            raise SystemExit(SPOILED)

    for number in range(start, len(steps)):
        what, run = steps[number]
        state |= {"step": number, "what": what}
        replace(file, json.dumps(state))
        try:
            run(emit)
        except MemoryError as error:  # foreseen: nothing was filled
            emit({"what": what, "median": None, "note": str(error)})
        except Exception as error:
            emit({"what": what, "failed": 1, "note": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


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
    """Run a command that calls `run_steps`, again behind a step that ended it, until all steps ran.

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
