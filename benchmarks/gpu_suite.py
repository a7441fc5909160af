"""Everything worth running on a GPU, most valuable first: tests, exactness at full size, times beside their floors.

    python benchmarks/gpu_suite.py

Each part runs in a process of its own, and goes on in a new one behind a step that crashed, hung or spoiled the CUDA
context. The results are written again and again meanwhile. Without an NVIDIA GPU nothing is measured. `--tiny` checks
the script without a GPU: every part runs on a few keys in Triton's interpreter, and the times mean nothing.
"""

import argparse
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from gpu_part import Limits, Step, Watched, run_steps, watch
from report import ROOT

OUTPUT = ROOT / "benchmarks" / "results" / "gpu_suite.json"

# Of each part: its share of the time (later parts get what an earlier one leaves), the module and the function of its
# steps (imported by its part alone), and its title.
PARTS = {
    "compile": (4, "gpu_tests.compile_steps", "Compiling for the other parts, on all cores"),
    "tests": (6, "gpu_tests.steps", "The tests that need a GPU"),
    "exactness": (5, "gpu_exactness.steps", "Exactness at full size"),
    "kernels": (7, "gpu_times.kernels", "A step of a layer: 8 KV heads, 4 query heads each, D=128, 2 %, batch 1"),
    "encode": (2, "gpu_times.encode", "Hashing a prompt, and the prefill"),
    "decode": (5, "gpu_times.decode", "Decoding through transformers: random Llama 3.1 8B, batch 1"),
    "serving": (3, "gpu_serving.steps", "A server's step of a layer, over pages of 16 tokens; vLLM where it is"),
    "calibrate": (1, "gpu_times.calibrate", "Calibration"),
}
COLUMNS = (
    "tokens what exact differing of unit median spread eager floor times_floor tokens_per_second passed failed errors "
    "skipped note"
).split()
WRITE = 2  # seconds between two versions of the results while a part runs


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
received: list[int] = []  # looked at again and again: an exception at any place could leave a process behind


class StoppedError(Exception):
    """A signal asks the suite to end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS),
        help="default: all. The other parts of an existing results file stay if it has the same commit, sources, "
        "versions and GPU, so that several commands add up",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--output", "-o", type=Path, help="default: benchmarks/results/gpu_suite.json")
    parser.add_argument("--logs", type=Path, help="keep what the processes print in this folder")
    parser.add_argument("--tiny", action="store_true", help="check the script itself, without a GPU")
    for name in ("--part", "--slice", "--rows", "--start", "--seconds"):  # for the process of a part
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        rows = Path(arguments.rows)
        limits = Limits(arguments.tiny, time.monotonic() + float(arguments.seconds), rows.parent)
        run_steps(steps(arguments.part, limits, arguments.slice), rows, int(arguments.start))
        return
    ends = time.monotonic() + 60 * arguments.minutes
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    with tempfile.TemporaryDirectory() as folder:
        report.link_packages(Path(folder))
        logs = arguments.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        code = run(arguments, logs.resolve(), ends)
    sys.exit(128 + received[0] if received else code)


def steps(name: str, limits: Limits, portion: str | None) -> list[Step]:
    """The steps of a part; with `portion`, as 3/16, such a share of what the other parts compile."""
    module, _, function = PARTS[name][1].partition(".")
    made = importlib.import_module(module)
    if portion:
        first, step = map(int, portion.split("/"))
        return made.case_steps(first, step, tiny=limits.tiny)
    return getattr(made, function)(limits)


def run(arguments: argparse.Namespace, logs: Path, ends: float) -> int:
    """Run the parts; return 1 if one failed."""
    import torch

    gpu = torch.cuda.is_available() and torch.version.hip is None
    output = arguments.output or (OUTPUT if gpu and not arguments.tiny else None)
    selected = arguments.parts or list(PARTS)
    result = about(arguments) | {"parts": {name: {"status": "not measured"} for name in PARTS}}
    if not gpu and not arguments.tiny:
        print("No NVIDIA GPU here: nothing was measured.")
        report.keep(output, result)
        return 0
    if not gpu:
        os.environ |= {"TRITON_INTERPRET": "1", "BPC_BACKEND": "triton"}
    if arguments.parts:
        result = merged(output, result, selected)
    parts = result["parts"]
    left = [name for name in PARTS if name in selected]
    while left and not received:
        name, shares = left[0], sum(PARTS[each][0] for each in left)
        seconds = max(5.0, (ends - time.monotonic()) * PARTS[name][0] / shares)
        part(name, seconds, arguments.tiny, logs, functools.partial(keep, output, result, name))
        show(PARTS[name][2], parts[name])
        report.keep(output, result)
        left.pop(0)
    return int(any(parts[name]["status"] == "failed" for name in selected))


def keep(output: Path | None, result: dict[str, Any], name: str, made: dict[str, Any]) -> None:
    """Write what a part has measured so far."""
    result["parts"][name] = made | {"command": result["command"]}
    report.keep(output, result, quiet=True)


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Command, machine and settings; read once, before the results change the state of the checkout."""
    import torch

    machine = report.machine()
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        machine |= {"gpu_capability": f"{facts.major}.{facts.minor}", "driver": driver()}
    settings = {"minutes": arguments.minutes, "tiny": arguments.tiny, "sources": report.sources()}
    return {"command": report.command(), "machine": machine, **settings}


def driver() -> str | None:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def part(name: str, seconds: float, tiny: bool, logs: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run a part in its own processes; keep what it has measured, also while it runs and when a signal ends it."""
    words = [sys.executable, __file__, "--part", name, *(["--tiny"] if tiny else [])]
    print(f"{PARTS[name][2]}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
    began = written = time.monotonic()
    seen, changed = Watched(), False

    def made(running: str | None = None) -> dict[str, Any]:
        state = running or status(seen.rows, seen.fault, stopped=seen.stopped)
        facts: dict[str, Any] = {"status": state, "seconds": round(time.monotonic() - began, 1)}
        return facts | ({"fault": seen.fault} if seen.fault else {}) | {"rows": seen.rows}

    def look(now: Watched) -> None:
        nonlocal seen, written, changed
        changed = changed or len(now.rows) != len(seen.rows) or now.rows[-1:] != seen.rows[-1:]
        seen = Watched(list(now.rows), now.fault, now.stopped)
        if received:
            raise StoppedError
        if changed and time.monotonic() - written > WRITE:
            keep(made("running"))
            written, changed = time.monotonic(), False

    try:
        seen = watch(words, logs / f"{name}.json", seconds, look, own_group=True)
    except StoppedError:
        seen.fault, seen.stopped = "a signal ended it", True
    keep(made())


def merged(path: Path | None, result: dict[str, Any], selected: list[str]) -> dict[str, Any]:
    """`result` with the parts that are not selected as the file has them, if it measured the same code and GPU."""
    try:
        old = json.loads(path.read_text()) if path else None
        if old is None or _measured(old) != _measured(result):
            return result
        kept = {name: part for name, part in old["parts"].items() if name not in selected and name in result["parts"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return result
    return result | {"parts": result["parts"] | kept}


def _measured(result: dict[str, Any]) -> list[Any]:
    """What must be the same: the results file itself may make a checkout dirty."""
    machine = result["machine"]
    commit = (machine["commit"] or "").removesuffix("-dirty")
    return [commit, machine["gpu"], machine["versions"], result["sources"], result["tiny"]]


def status(rows: list[dict[str, Any]], fault: str | None, *, stopped: bool) -> str:
    """One word for a part: failed, stopped, measured or not measured."""
    if any(row.get("exact") is False or row.get("failed") or row.get("errors") for row in rows):
        return "failed"
    if stopped:
        return "stopped" if rows else "not measured"
    if fault:
        return "failed"
    return "measured" if rows else "not measured"


def show(title: str, made: dict[str, Any]) -> None:
    """Print the part as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(160, Console().width))
    rows = made["rows"]
    table = Table(title=f"{title}: {made['status']}, {made['seconds']} s", title_justify="left")
    columns = [each for each in COLUMNS if any(row.get(each) is not None for row in rows)]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column in ("what", "note") else "right")
    for row in rows:
        table.add_row(*(cell(row, column) for column in columns))
    console.print(table, markup=False)
    if "fault" in made:
        console.print(made["fault"], markup=False)
    sys.stdout.flush()


def cell(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        return "not measured" if column == "median" and "note" in row else ""
    if isinstance(value, list):
        return " to ".join(f"{each:,}" for each in value)
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    main()
