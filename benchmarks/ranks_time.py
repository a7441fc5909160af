"""How much faster calibration is on two processes of one thread than on one process of one thread, to the same bytes.

Alternates several times between the two, from the start of the command to its end: torchrun, the libraries, the weights
and the text count, too. Four processes run once, for their bytes: where there are fewer cores, their time says nothing.
A short run before compiles kernels. Nothing else may use the cores.

    python benchmarks/ranks_time.py --model SmolLM2-135M-Instruct --corpus prose --output ranks_time.json

With these samples, collecting and decomposing both matter for a model of 135 million parameters.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import report

TIMED, FOR_BYTES = (1, 2), (4,)  # processes
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--corpus", default="demo")
    parser.add_argument("--samples", type=int, default=16, help="in groups of four: every process gets whole groups")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = report.parse(parser, samples=5, sequence_length=128, repeats=1)

    found: dict[int, list[dict[str, Any]]] = {processes: [] for processes in TIMED + FOR_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "made.safetensors"
        calibrate(arguments, 1, target, samples=4, length=128)
        for processes in TIMED * arguments.repeats + FOR_BYTES:
            found[processes].append(calibrate(arguments, processes, target))
            print(f"{processes} processes: {found[processes][-1]['wall_seconds']:.1f} s", file=sys.stderr)
    rows = [row(processes, runs) for processes, runs in found.items()]
    result = {
        "rows": rows,
        "times_faster": round(rows[0]["wall_seconds"] / rows[1]["wall_seconds"], 2),
        "same_bytes": len({run["sha256"] for runs in found.values() for run in runs}) == 1,
    }
    print(json.dumps(result, indent=2))
    settings = report.settings(arguments, ("samples", "sequence_length", "repeats"))
    settings |= {name: report.without_folder(getattr(arguments, name)) for name in ("model", "corpus")}
    report.write(arguments.output, {"settings": settings | {"threads_per_process": 1}, **result})


def row(processes: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of several runs, and the hashes of their files."""
    stages = runs[0]["seconds_by_stage"]
    return {
        "processes": processes,
        "wall_seconds": median(run["wall_seconds"] for run in runs),
        "seconds_by_stage": {stage: median(run["seconds_by_stage"][stage] for run in runs) for stage in stages},
        "runs": [run["wall_seconds"] for run in runs],
        "sha256": sorted({run["sha256"] for run in runs}),
    }


def calibrate(
    arguments: Any, processes: int, target: Path, samples: int | None = None, length: int | None = None
) -> dict[str, Any]:
    """Run `bpc calibrate` on this many processes of one thread, and return what it reports."""
    words = [sys.executable, *([*LAUNCH, str(processes)] if processes > 1 else []), "-m", "bpc_cli", "calibrate"]
    words += ["-m", arguments.model, "--corpus", arguments.corpus, "-o", str(target), "--json", "-q", "--force"]
    words += ["--samples", str(samples or arguments.samples)]
    words += ["--sequence-length", str(length or arguments.sequence_length)]
    start = time.perf_counter()
    done = subprocess.run(words, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    seconds = round(time.perf_counter() - start, 2)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"wall_seconds": seconds, "sha256": hashlib.sha256(target.read_bytes()).hexdigest()}


if __name__ == "__main__":
    main()
