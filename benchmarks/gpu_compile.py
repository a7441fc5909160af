"""Compile what the later parts need, in one process per core: Triton keeps it on disk.

Each process calls the kernels once, with the sizes of the later parts, and compares nothing. The tests run too, each
once: a test compiles what it needs.
"""

import functools
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gpu_part import MODULES, Emit, Limits, Step
from gpu_process import Watched, end, watch
from gpu_tests import ROOT, command, files, report

__all__ = ["slice_steps", "steps"]

PARTS = ("exactness", "kernels", "encode", "decode", "serving")  # that have `cases`
TESTS = 0.6  # of the time: what the tests may take, so that a hang leaves time for the cases

Work = Callable[[], list[dict[str, Any]]]


def steps(limits: Limits) -> list[Step]:
    """Two steps: the tests, the cases of the other parts; the processes of each run side by side."""
    cores = 2 if limits.tiny else os.cpu_count() or 1
    slices = 1 if limits.tiny else cores
    tests: list[Work] = [functools.partial(_tests, i, slices, limits) for i in range(slices)]
    cases: list[Work] = [functools.partial(_cases, i, cores, limits) for i in range(cores)]
    return [("tests and cases", functools.partial(_all, {"tests": tests, "cases": cases}, cores))]


def _all(works: dict[str, list[Work]], cores: int, emit: Emit) -> None:
    """Run all works on the cores; emit how many ended, and once what went wrong."""
    counts = {kind: {"what": f"{kind}, in {len(group)} processes", "passed": 0, "failed": 0}
              for kind, group in works.items()}  # fmt: skip
    told: set[tuple[str, str]] = set()
    with ThreadPoolExecutor(cores) as pool:
        futures = {pool.submit(work): kind for kind, group in works.items() for work in group}
        for future in as_completed(futures):
            for row in future.result():
                counts[futures[future]]["passed"] += row.pop("passed", 0)
                counts[futures[future]]["failed"] += row.get("failed", 0)
                key = (row["what"], row.get("note", ""))
                if "note" in row and key not in told:
                    told.add(key)
                    emit(row)
    for row in counts.values():
        emit({name: value for name, value in row.items() if value})


def _tests(first: int, step: int, limits: Limits) -> list[dict[str, Any]]:
    """A slice of the tests; what fails here is not a failure yet, because the tests run again."""
    what = f"tests, slice {first + 1} of {step}"
    seconds = TESTS * limits.left
    ends = time.monotonic() + seconds
    log = limits.folder / f"slice-{first}.log"
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = _environment() | {"BPC_SLICE": f"{first}/{step}", "PYTHONPATH": os.pathsep.join(path)}
    places = sorted({place.split("::")[0] for place in files(tiny=limits.tiny)})
    with log.open("w") as output:
        words = command("-p", "gpu_slice", *places)
        process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output, env=environment)
        try:
            process.wait(max(1.0, ends - time.monotonic()))
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process, group=False)
    row = report(what, log.read_text(errors="replace"), code, seconds)
    missed = row["failed"] + row["errors"]
    made: dict[str, Any] = {"what": what, "passed": row["passed"]}
    return [made | ({"note": f"{missed} do not pass here: {row['note']}"} if missed else {})]


def _environment() -> dict[str, str]:
    """A core for each process."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _cases(first: int, step: int, limits: Limits) -> list[dict[str, Any]]:
    """A slice of the cases of all parts."""
    script = str(Path(__file__).with_name("gpu_suite.py"))
    words = ["env", "OMP_NUM_THREADS=1", sys.executable, script, "--part", "compile", "--slice", f"{first}/{step}"]
    words += ["--tiny"] if limits.tiny else []
    watched: Watched = watch(words, limits.folder / f"cases-{first}.json", max(2.0, limits.left - 1))
    rows = [row for row in watched.rows if row.get("passed") or "note" in row]
    if watched.fault:
        rows.append({"what": f"cases, slice {first + 1} of {step}", "note": watched.fault})
    return rows


def slice_steps(first: int, step: int, *, tiny: bool) -> list[Step]:
    """One step per case; a module that cannot be imported costs its own cases."""
    made: list[Step] = []
    for part in PARTS:
        try:
            cases = importlib.import_module(MODULES[part]).cases(tiny=tiny)
        except Exception as error:
            made.append((part, functools.partial(_cannot, error)))
            continue
        kept = cases[:1] if tiny else cases
        made += [(f"{part}: {what}", functools.partial(_run, f"{part}: {what}", run)) for what, run in kept]
    return made[first::step]


def _cannot(error: Exception, emit: Emit) -> None:
    raise error


def _run(what: str, run: Callable[[], Any], emit: Emit) -> None:
    import torch

    why = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if isinstance(why, dict):
        why = why.get("note")
    emit({"what": what, "passed": 1} if why is None else {"what": what, "note": why})
