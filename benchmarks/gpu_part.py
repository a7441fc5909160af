"""A part of `gpu_suite.py` within its own process: its steps in order, and a file that says how far they are.

A part is a module with a function `steps`. After a fault that spoils the CUDA context nothing works in the same
process any more, so the process ends, and `gpu_process.watch` begins a new one behind the step that failed.
"""

import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite_files import replace

__all__ = ["MODULES", "SPOILED", "Emit", "Limits", "Step", "measure", "run_steps", "spoils"]

MODULES = {
    "compile": "gpu_compile", "tests": "gpu_tests", "exactness": "gpu_exactness", "kernels": "gpu_kernels",
    "encode": "gpu_encode", "decode": "gpu_decode", "serving": "gpu_serving", "calibrate": "gpu_calibrate",
}  # fmt: skip

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


def measure(name: str, rows: Path, start: int, limits: Limits, *, portion: str = "") -> None:
    """Run the steps of a part from number `start` on, or with `portion`, as 3/16, a part of its cases.

    Import only what this part needs.
    """
    module = importlib.import_module(MODULES[name])
    if portion:
        first, step = map(int, portion.split("/"))
        made = module.slice_steps(first, step, tiny=limits.tiny)
    else:
        made = module.steps(limits)
    run_steps(made, rows, start)


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
