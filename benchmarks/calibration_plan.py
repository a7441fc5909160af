"""What `bpc calibrate --dry-run` forecasts beside what the calibration then takes.

    python benchmarks/calibration_plan.py -m build/real/SmolLM2-135M-Instruct build/real/gemma-3-270m \\
        --corpus prose=build/real/text/calibration/prose code=build/real/text/calibration/code \\
        --output calibration_plan.json
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--models", "-m", nargs="+", default=["demo"])
    parser.add_argument("--corpus", nargs="+", default=["demo"])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--sequence-length", type=int, default=2048)
    arguments = report.parse(parser, samples=3, sequence_length=128)
    words = ["--samples", str(arguments.samples), "--sequence-length", str(arguments.sequence_length)]
    for spec in arguments.corpus:
        words += ["--corpus", spec]
    rows = []
    for model in arguments.models:
        rows.append(compare(model, words))
        print(rows[-1], file=sys.stderr)
    print(json.dumps(rows, indent=2))
    settings = report.settings(arguments, ("samples", "sequence_length"))
    report.write(arguments.output, {"settings": settings, "rows": rows})


def compare(model: str, words: list[str]) -> dict[str, Any]:
    """The forecast and the real figures of one model, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = ["-o", f"{folder}/a.safetensors"]
        plan = calibrate("-m", model, *words, *output, "--dry-run")
        real = calibrate("-m", model, *words, *output, "--keep-work")
        files = [file for file in Path(folder, "a.safetensors.work").rglob("*") if file.is_file()]
        disk = sum(file.stat().st_size for file in files)
    seconds = real["seconds_by_stage"]
    pairs = {
        "collect_seconds": (plan["collect_seconds"], seconds["keys"]),
        "decompose_seconds": (plan["decompose_seconds"], seconds["decompose"]),
        "memory_bytes": (plan["memory_bytes"], real["peak_memory_bytes"]),
        "work_bytes": (plan["work_bytes"], disk),
    }
    row: dict[str, Any] = {"model": report.without_folder(model), "tokens_per_second": real["tokens_per_second"]}
    for name, (forecast, measured) in pairs.items():
        row[name] = {"plan": forecast, "real": measured, "ratio": round(forecast / max(measured, 0.1), 2)}
    return row


def calibrate(*words: str) -> dict[str, Any]:
    """The JSON of one `bpc calibrate`."""
    command = [sys.executable, "-c", "from bpc_cli.main import main; main()", "calibrate", *words, "--json", "-q"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


if __name__ == "__main__":
    main()
