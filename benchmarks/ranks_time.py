"""How much faster calibration is on two processes of one thread than on one process of one thread.

Alternates several times between the two, from the start of the command to the file, and compares the files. The start
of the processes and the libraries counts, and torchrun's own.

    python benchmarks/ranks_time.py --output ranks_time.json
"""

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


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--corpus", default="demo")
    parser.add_argument("--samples", type=int, default=360)
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = report.parse(parser, samples=5, sequence_length=128, repeats=1)

    runs: dict[int, list[dict[str, Any]]] = {1: [], arguments.ranks: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repeats):
            for ranks, found in runs.items():
                found.append(calibrate(arguments, ranks, Path(folder) / f"{ranks}.safetensors"))
                print(f"{ranks} processes: {found[-1]['wall_seconds']:.1f} s", file=sys.stderr)
        same = len({(Path(folder) / f"{ranks}.safetensors").read_bytes() for ranks in runs}) == 1
    rows = [
        {
            "processes": ranks,
            "wall_seconds": median(run["wall_seconds"] for run in found),
            "seconds_by_stage": {
                stage: median(run["seconds_by_stage"][stage] for run in found) for stage in found[0]["seconds_by_stage"]
            },
            "peak_memory_bytes": max(run["peak_memory_bytes"] for run in found),
            "runs": [run["wall_seconds"] for run in found],
        }
        for ranks, found in runs.items()
    ]
    result = {"rows": rows, "times_faster": round(rows[0]["wall_seconds"] / rows[1]["wall_seconds"], 2)}
    result["same_bytes"] = same
    print(json.dumps(result, indent=2))
    settings = report.settings(arguments, ("corpus", "samples", "sequence_length", "ranks", "repeats"))
    settings |= {"model": report.without_folder(arguments.model), "threads_per_process": 1}
    report.write(arguments.output, {"settings": settings, **result})


def calibrate(arguments: Any, ranks: int, target: Path) -> dict[str, Any]:
    """Run `bpc calibrate` on this many processes of one thread, and return what it reports."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    words = [sys.executable, "-m", *launch, "bpc_cli", "calibrate", "-m", arguments.model, "--json", "-q", "--force"]
    words += ["--corpus", arguments.corpus, "--samples", str(arguments.samples), "-o", str(target)]
    words += ["--sequence-length", str(arguments.sequence_length)]
    start = time.perf_counter()
    done = subprocess.run(words, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"wall_seconds": round(time.perf_counter() - start, 2)}


if __name__ == "__main__":
    main()
