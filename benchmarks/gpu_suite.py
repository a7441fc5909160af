"""Everything worth running on a GPU, most valuable first: tests, exactness at full size, times beside their floors.

    python benchmarks/gpu_suite.py

Each part runs in its own process, so that a failure in one does not reach another, and the results are written again
after each part. Without an NVIDIA GPU nothing is measured. `--tiny` checks the script without a GPU: every part runs on
a few keys in Triton's interpreter, and the times mean nothing.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "benchmarks" / "results" / "gpu_suite.json"

# The parts and their shares of the time; the later parts get the time that an earlier one leaves.
PARTS = {"tests": 4, "exactness": 5, "kernels": 7, "encode": 2, "decode": 4, "calibrate": 1}
TITLES = {
    "tests": "The tests that need a GPU",
    "exactness": "Exactness at full size",
    "kernels": "A decoding step of a layer: 8 KV heads, 4 query heads each, D=128, bf16, 2 %, batch 1",
    "encode": "Hashing a prompt, and the prefill of the layer",
    "decode": "Decoding through transformers: random weights of Llama 3.1 8B's shape, batch 1",
    "calibrate": "Calibration",
}
COLUMNS = (
    "tokens what exact differing of unit median spread eager floor times_floor tokens_per_second passed failed errors "
    "skipped note"
).split()

Emit = Callable[[dict[str, Any]], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--output", "-o", type=Path, help="default: benchmarks/results/gpu_suite.json")
    parser.add_argument("--tiny", action="store_true", help="check the script itself, without a GPU")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # for the process of a part
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        measure(arguments.part, arguments.rows, tiny=arguments.tiny)
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        link_packages(Path(folder))
        sys.exit(run(arguments, Path(folder)))


def link_packages(folder: Path) -> None:
    """Measure this checkout, installed or not: link its folders under the names that they have when installed."""
    for name, source in (("bpc_calib", "bpc_calib"), ("bpc_artifacts", "artifacts"), ("bpc_cli", "cli")):
        (folder / name).symlink_to(ROOT / source)
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    about = folder / "bpc_calib-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bpc-calib\nVersion: {found[1] if found else 0}\n")


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the parts; return 1 if one failed."""
    import torch

    gpu = torch.cuda.is_available() and torch.version.hip is None
    output = arguments.output or (OUTPUT if gpu and not arguments.tiny else None)
    parts = {name: {"status": "not measured"} for name in PARTS}
    result = about(arguments) | {"parts": parts}
    if not gpu and not arguments.tiny:
        print("No NVIDIA GPU here: nothing was measured.")
        write(output, result)
        return 0
    if not gpu:
        os.environ |= {"TRITON_INTERPRET": "1", "BPC_BACKEND": "triton"}
    ends = time.monotonic() + 60 * arguments.minutes
    left = [name for name in PARTS if name in arguments.parts]
    while left:
        name, shares = left[0], sum(PARTS[each] for each in left)
        seconds = max(5.0, (ends - time.monotonic()) * PARTS[name] / shares)
        parts[name] = part(name, folder / f"{name}.json", seconds, tiny=arguments.tiny)
        show(name, parts[name])
        write(output, result)
        left.pop(0)
    return int(any(each["status"] == "failed" for each in parts.values()))


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Command, machine and settings; read once, before the results change the state of the checkout."""
    import report
    import torch

    machine = report.machine()
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        machine |= {"gpu_capability": f"{facts.major}.{facts.minor}", "driver": driver()}
    command = " ".join(["python", *map(report.without_folder, sys.argv)])
    return {"command": command, "machine": machine, "minutes": arguments.minutes, "tiny": arguments.tiny}


def driver() -> str | None:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def part(name: str, rows: Path, seconds: float, *, tiny: bool) -> dict[str, Any]:
    """Run a part in its own process; return what it measured, even if it failed or ran out of time."""
    words = [sys.executable, __file__, "--part", name, "--rows", str(rows), *(["--tiny"] if tiny else [])]
    print(f"{TITLES[name]}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
    began = time.monotonic()
    log = rows.with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.Popen(words, stderr=errors, start_new_session=True)
        try:
            code = process.wait(seconds)
            fault = f"exit {code}: {last_line(log.read_text())}" if code else None
            status = "failed" if code else "measured"
        except subprocess.TimeoutExpired:
            status, fault = "stopped", f"ran out of its {seconds:.0f} s"
        finally:
            end(process)
    measured = json.loads(rows.read_text()) if rows.exists() else []
    if any(row.get("exact") is False or row.get("failed") or row.get("errors") for row in measured):
        status = "failed"
    if not measured and status != "failed":
        status = "not measured"
    made: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
    return made | ({"fault": fault} if fault else {}) | {"rows": measured}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started: they form a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def measure(name: str, rows: Path, *, tiny: bool) -> None:
    """Run a part in this process and write its rows to a file, again after each row."""
    held: list[dict[str, Any]] = []

    def emit(row: dict[str, Any]) -> None:
        if held and held[-1]["what"] == row["what"] and "tokens" not in row:
            held.pop()  # a newer count replaces it
        held.append(row)
        replace(rows, json.dumps(held))

    if name == "tests":
        run_tests(emit, tiny=tiny)
        return
    import gpu_exactness
    import gpu_kernels
    import gpu_models

    functions = {
        "exactness": gpu_exactness.exactness, "kernels": gpu_kernels.steps, "encode": gpu_models.hashing,
        "decode": gpu_models.decoding, "calibrate": gpu_models.calibration,
    }  # fmt: skip
    functions[name](emit, tiny=tiny)


def run_tests(emit: Emit, *, tiny: bool) -> None:
    """Run `pytest -m gpu`: emit the counts so far and the names of the tests that did not pass."""
    if importlib.util.find_spec("pytest") is None:
        emit({"what": "pytest -m gpu", "note": "not measured: pytest is not installed"})
        return
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "--tb=short"]
    words += ["--continue-on-collection-errors", "tests/test_gpu.py" if tiny else "tests"]
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    names: list[str] = []
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if found := re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", line):
                kind = {"ERROR": "errors"}.get(found[2], found[2].lower())
                counts[kind] += 1
                names += [found[1]] if kind in ("failed", "errors") else []
            elif found := re.match(r"ERROR (\S+\.py)( |$)", line):  # could not be collected
                counts["errors"] += 1
                names.append(found[1])
            else:
                continue
            emit({"what": "pytest -m gpu", **counts} | ({"note": ", ".join(names)} if names else {}))
    if not any(counts.values()):
        emit({"what": "pytest -m gpu", "note": f"not measured: pytest ran no test and ended with {process.returncode}"})


def show(name: str, made: dict[str, Any]) -> None:
    """Print the part as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(160, Console().width))
    rows = made["rows"]
    table = Table(title=f"{TITLES[name]}: {made['status']}, {made['seconds']} s", title_justify="left")
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


def write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(result, indent=2) + "\n")
        print(f"Wrote {path}", file=sys.stderr, flush=True)


def replace(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)


if __name__ == "__main__":
    main()
