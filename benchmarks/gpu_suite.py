"""Everything worth running on an NVIDIA GPU: tests, exactness at full size, times beside their floors.

    python benchmarks/gpu_suite.py

Each part runs in a process of its own, which prints a line of JSON per row. If it fails or runs out of time, its rows
so far count, and the other parts run all the same. `--tiny` checks the script without a GPU: every part runs on a few
keys in Triton's interpreter, and the times mean nothing.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import report
from report import ROOT, Row

OUTPUT = ROOT / "benchmarks" / "results" / "gpu_suite.json"

# Of each part: its share of the time (later parts get what an earlier one leaves), the module and the function that
# yields its rows (imported by its process alone), and its title.
PARTS = {
    "tests": (17, "gpu_suite.tests", "The tests that need a GPU"),
    "exactness": (3, "gpu_exactness.rows", "Exactness at full size"),
    "layer": (7, "gpu_times.layer", "A step of a layer: 8 KV heads, 4 query heads each, D=128, 2 %, batch 1"),
    "prefill": (2, "gpu_times.prefill", "Hashing a prompt, and the prefill"),
    "decode": (5, "gpu_times.decode", "Decoding with a random Llama 3.1 8B, batch 1"),
    "serving": (3, "gpu_times.serving", "A server's step of a layer, over pages of 16 tokens"),
    "calibrate": (1, "gpu_times.calibrate", "Calibration"),
}
COLUMNS = "tokens what exact differing of unit median spread floor floor_share passed failed skipped note".split()
received: list[int] = []  # signals, looked at again and again: an exception could leave a process behind


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS),
        help="default: all. The other parts of an existing results file stay if it has the same commit, sources, "
        "versions and GPU, so that several commands add up",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # for the process of a part
    arguments = parser.parse_args()
    if arguments.part:
        module, _, function = PARTS[arguments.part][1].partition(".")
        for row in getattr(importlib.import_module(module), function)(tiny=arguments.tiny):
            print(json.dumps(row), flush=True)
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: received.append(number))
    with tempfile.TemporaryDirectory() as folder:
        report.link_packages(Path(folder))
        code = run(arguments)
    sys.exit(128 + received[0] if received else code)


def run(arguments: argparse.Namespace) -> int:
    """Run the parts; return 1 if one failed."""
    import torch

    gpu = torch.cuda.is_available() and torch.version.hip is None
    output = arguments.output or (OUTPUT if gpu and not arguments.tiny else None)
    settings = {"minutes": arguments.minutes, "tiny": arguments.tiny, "sources": report.sources()}
    parts: dict[str, Row] = {name: {"status": "not measured"} for name in PARTS}
    result = report.about() | settings | {"parts": parts}
    if not gpu and not arguments.tiny:
        print("No NVIDIA GPU here: nothing was measured.")
        report.keep(output, result)
        return 0
    if not gpu:
        os.environ |= {"TRITON_INTERPRET": "1", "BPC_BACKEND": "triton"}
    selected = [name for name in PARTS if name in (arguments.parts or PARTS)]
    if arguments.parts:
        parts |= earlier(output, result)
    ends = time.monotonic() + 60 * arguments.minutes
    for place, name in enumerate(selected):
        share = PARTS[name][0] / sum(PARTS[each][0] for each in selected[place:])
        seconds = max(5.0, (ends - time.monotonic()) * share)
        words = [sys.executable, __file__, "--part", name, *(["--tiny"] if arguments.tiny else [])]
        print(f"{PARTS[name][2]}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
        parts[name] = part(words, seconds) | {"command": result["command"]}
        show(PARTS[name][2], parts[name])
        report.keep(output, result)
        if received:
            break
    return int(any(parts[name]["status"] == "failed" for name in selected))


def earlier(path: Path | None, result: Row) -> Row:
    """The parts that an existing file has from the same code and GPU."""
    try:
        old = json.loads(path.read_text()) if path else {}
        same = _measured(old) == _measured(result)
        return {name: part for name, part in old["parts"].items() if name in PARTS} if same else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _measured(result: Row) -> list[Any]:
    machine = result["machine"]
    commit = (machine["commit"] or "").removesuffix("-dirty")  # the results file itself makes a checkout dirty
    return [commit, machine["gpu"], machine["versions"], result["sources"], result["tiny"]]


def part(words: list[str], seconds: float) -> Row:
    """Run the process of a part, and kill it with all that it started when its time is over or a signal came."""
    began, fault = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(words, stdout=output, stderr=log, start_new_session=True)
        while (code := process.poll()) is None and time.monotonic() - began < seconds and not received:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        log.seek(0)
        rows, said = output.read().splitlines(), log.read().splitlines()
    last = " | ".join([line.strip() for line in said if line.strip()][-3:])[-500:]
    if code is None:
        fault = "a signal ended it" if received else f"ran out of its {seconds:.0f} s: {last}"
    elif code:
        fault = f"exit {code}: {last}"
    made = list(parsed(rows))
    failed = fault or any(row.get("exact") is False or row.get("failed") for row in made)
    status = "failed" if failed else "measured" if made else "not measured"
    about = {"status": status, "seconds": round(time.monotonic() - began, 1)}
    return about | ({"fault": fault} if fault else {}) | {"rows": made}


def parsed(lines: list[str]) -> Iterator[Row]:
    """The rows among the lines; libraries may print others, and a killed process half a row."""
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def tests(*, tiny: bool) -> Iterator[Row]:
    """`pytest -m gpu`, with workers side by side where it can: most of the time goes to the compiler.

    What pytest prints goes to the log, whose last lines are shown if it dies or hangs.
    """
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    places = [ROOT / "tests" / "test_gpu.py"] if tiny else marked
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        words = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "--tb=short"]
        words += ["-o", "faulthandler_timeout=120", f"--junitxml={xml}"]
        if not tiny and importlib.util.find_spec("xdist"):
            words += ["-n", str(min(16, os.cpu_count() or 1))]
        ran = subprocess.run([*words, *map(str, places)], cwd=ROOT, stdout=sys.stderr, check=False)
        if not xml.is_file():
            sys.exit(f"pytest ended with status {ran.returncode}")
        yield counted(xml)


def counted(xml: Path) -> Row:
    """The counts of pytest's report, the names of what did not pass, and the first error."""
    cases = list(ElementTree.parse(xml).getroot().iter("testcase"))
    faults = {case: fault for case in cases for fault in case if fault.tag in ("failure", "error")}
    skipped = sum(case.find("skipped") is not None for case in cases)
    row: Row = {"what": "pytest -m gpu", "passed": len(cases) - len(faults) - skipped, "failed": len(faults)}
    row["skipped"] = skipped
    if faults:
        names = ", ".join(f"{case.get('classname')}::{case.get('name')}" for case in faults)
        first = " ".join((next(iter(faults.values())).get("message") or "").split())[:300]
        row["note"] = f"{names}; first: {first}"
        if "CUDA error" in first:
            row["note"] += "; it spoils its process: failures after it say nothing"
    return row


def show(title: str, made: Row) -> None:
    """Print what `bpc bench` measured as it prints it, and the other rows as a table."""
    from bpc_cli.bench_tables import print_benchmark

    print(f"{title}: {made['status']}, {made['seconds']} s")
    for row in (row for row in made["rows"] if "result" in row):
        print_benchmark(row["result"])
    if lines := [[_cell(row.get(column)) for column in COLUMNS] for row in made["rows"] if "result" not in row]:
        print(report.table(COLUMNS, lines))
    print(made.get("fault", ""), flush=True)


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " to ".join(f"{each:,}" for each in value)
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else value


if __name__ == "__main__":
    main()
