"""The tests that need a GPU: every file in a process of its own, the most valuable first."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_part import Emit, Limits, Step, spoils
from gpu_process import end, last_line

__all__ = ["ROOT", "command", "files", "run_tests", "steps"]

ROOT = Path(__file__).parent.parent
FIRST = ("tests/test_kernels.py::test_a_step_in_a_cuda_graph", "tests/test_gpu.py")
LINE = re.compile(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
UNCOLLECTED = re.compile(r"^ERROR (\S+\.py)(?: |$)", re.MULTILINE)
BEGUN = re.compile(r"^(\S+::\S.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$", re.MULTILINE)
COUNTS = ("passed", "failed", "errors", "skipped")


def steps(limits: Limits) -> list[Step]:
    """One step per file."""
    if importlib.util.find_spec("pytest") is None:
        return [("tests", lambda emit: emit({"what": "tests", "note": "not measured: pytest is not installed"}))]
    places = files(tiny=limits.tiny)
    most = [0.35 * limits.left] * (len(places) - 1) + [limits.left]  # less than a step may take, see `gpu_process`
    return [(place, functools.partial(_step, place, each, limits)) for place, each in zip(places, most, strict=True)]


def files(*, tiny: bool) -> list[str]:
    """The files with tests for a GPU, found by the mark, so that one that cannot be imported stops no other."""
    if tiny:
        return [FIRST[1]]
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    return [*FIRST, *(name for path in marked if (name := path.relative_to(ROOT).as_posix()) not in FIRST)]


def command(*words: str) -> list[str]:
    """`pytest -m gpu` that names each test before it runs; a test of two minutes shows where it hangs."""
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors"]
    options += ["-c", str(ROOT / "pyproject.toml"), "-o", "faulthandler_timeout=120"]
    return [sys.executable, "-m", "pytest", *options, *words]


def _step(place: str, most: float, limits: Limits, emit: Emit) -> None:
    emit(run_tests(place, command(place), min(most, limits.left - 1), limits.folder, emit))


def run_tests(what: str, words: list[str], seconds: float, folder: Path, emit: Callable[[dict[str, Any]], None]) -> Any:
    """Run pytest and emit the counts whenever they change; return the last row."""
    log = folder / (re.sub(r"\W+", "-", what) + ".log")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # or a process that is killed takes its last lines with it
    emitted, ends = None, time.monotonic() + seconds
    with log.open("w") as output:
        process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None and time.monotonic() < ends:
                time.sleep(0.3)
                row = {"what": what, **_counts(log.read_text(errors="replace"))}
                if row != emitted:
                    emit(row)
                    emitted = row
            hangs = process.poll() is None
        finally:
            end(process, group=False)
    code = None if hangs else process.returncode
    return report(what, log.read_text(errors="replace"), code, seconds)


def _counts(text: str) -> dict[str, int]:
    counts = dict.fromkeys(COUNTS, 0)
    for _, outcome in LINE.findall(text):
        kind = {"ERROR": "errors", "XFAIL": "skipped", "XPASS": "passed"}.get(outcome, outcome.lower())
        counts[kind] += 1
    counts["errors"] += len(set(UNCOLLECTED.findall(text)))
    return counts


def report(what: str, text: str, code: int | None, seconds: float) -> dict[str, Any]:
    """The row of a run: counts, names of what did not pass, and the first error; code None: it ran out of time."""
    row: dict[str, Any] = {"what": what, **_counts(text)}
    begun = [each.rstrip() for each in BEGUN.findall(text)]
    notes = []
    if code is None:
        row["errors"] += 1
        notes.append(f"stopped after {seconds:.0f} s in {begun[-1] if begun else 'the imports'}")
    elif code not in (0, 1, 5):
        row["errors"] += not (row["errors"] or row["failed"])
        notes.append(f"exit {code} in {begun[-1] if begun else 'the imports'}")
    elif not any(row[kind] for kind in COUNTS):
        notes.append(f"not measured: pytest ran no test: {last_line(text)}")
    if spoils(text):
        notes.append("a CUDA error spoiled the process: the tests after the first that failed say nothing")
    names = [name for name, outcome in LINE.findall(text) if outcome in ("FAILED", "ERROR")]
    names += sorted(set(UNCOLLECTED.findall(text)))
    if names:
        notes.append(", ".join(names))
    if (row["failed"] or row["errors"]) and (first := re.search(r"^E\s+(\S.*)", text, re.MULTILINE)):
        notes.append(first[1][:300])
    return row | ({"note": "; ".join(notes)} if notes else {})
