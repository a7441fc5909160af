"""The tests that need a GPU, and compiling all that the later parts need.

Every file of tests runs in a process of its own, the most valuable first. Before, one process per core calls a share of
the tests and of the kernels once, with the sizes of the later parts, and compares nothing: Triton keeps on disk what it
compiled. This module is also the plugin of pytest that selects such a share.
"""

import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gpu_part import Emit, Limits, Step, Watched, end, last_line, spoils, watch
from report import ROOT

__all__ = ["case_steps", "command", "compile_steps", "files", "run_tests", "steps"]

FIRST = ("tests/test_kernels.py::test_a_step_in_a_cuda_graph", "tests/test_gpu.py")
LINE = re.compile(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
UNCOLLECTED = re.compile(r"^ERROR (\S+\.py)(?: |$)", re.MULTILINE)
BEGUN = re.compile(r"^(\S+::\S.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$", re.MULTILINE)
COUNTS = ("passed", "failed", "errors", "skipped")
CASES = ("gpu_exactness", "gpu_times", "gpu_serving")  # modules with `cases`
TESTS = 0.6  # of the time: what the tests may take, so that a hang leaves time for the cases

Work = Callable[[], list[dict[str, Any]]]


def steps(limits: Limits) -> list[Step]:
    """One step per file."""
    if importlib.util.find_spec("pytest") is None:
        return [("tests", lambda emit: emit({"what": "tests", "note": "not measured: pytest is not installed"}))]
    places = files(tiny=limits.tiny)
    most = [0.35 * limits.left] * (len(places) - 1) + [limits.left]  # less than a step may take, see `gpu_part`
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


def compile_steps(limits: Limits) -> list[Step]:
    """Two steps: the tests, the cases of the other parts; the processes of each run side by side."""
    cores = 2 if limits.tiny else os.cpu_count() or 1
    slices = 1 if limits.tiny else cores
    tests: list[Work] = [functools.partial(_slice, i, slices, limits) for i in range(slices)]
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


def _slice(first: int, step: int, limits: Limits) -> list[dict[str, Any]]:
    """A slice of the tests; what fails here is not a failure yet, because the tests run again."""
    what = f"tests, slice {first + 1} of {step}"
    seconds = TESTS * limits.left
    ends = time.monotonic() + seconds
    log = limits.folder / f"slice-{first}.log"
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "BPC_SLICE": f"{first}/{step}"}
    environment |= {"PYTHONPATH": os.pathsep.join(path)}
    places = sorted({place.split("::")[0] for place in files(tiny=limits.tiny)})
    with log.open("w") as output:
        words = command("-p", "gpu_tests", *places)
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


def case_steps(first: int, step: int, *, tiny: bool) -> list[Step]:
    """One step per case; a module that cannot be imported costs its own cases."""
    made: list[Step] = []
    for module in CASES:
        try:
            cases = importlib.import_module(module).cases(tiny=tiny)
        except Exception as error:
            made.append((module, functools.partial(_cannot, error)))
            continue
        made += [(what, functools.partial(_run, what, run)) for what, run in (cases[:1] if tiny else cases)]
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


def pytest_configure(config: Any) -> None:
    """As a plugin: BPC_SLICE=3/16 keeps the tests 3, 19, 35 and so on of those that other plugins leave."""
    import pytest

    first, step = map(int, os.environ["BPC_SLICE"].split("/"))

    class Share:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            items[:] = items[first::step]

    config.pluginmanager.register(Share())
