"""The peak memory of calibration: by the number of samples, and of one long sample at once and in chunks.

    python benchmarks/calibration_memory.py --long-model build/real/gemma-3-270m --output calibration_memory.json

Every figure is of a process of its own. docs/calibrating.md says when a sample goes through the model in chunks.
"""

import json
import subprocess
import sys
import tempfile
from typing import Any

import report

ONE_PASS = """
import json, sys, time, torch
from bpc_calib import describe
from bpc_calib.calibration import keys
from bpc_calib.calibration.keys import sample_keys
from bpc_calib.models.loading import load_model
from bpc_cli.calibration_report import peak_memory
name, length, chunks = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "chunks"
model = load_model(name)
description = describe(model.config)
keys.pass_bytes = lambda *arguments: (2, 1) if chunks else (1, 1)  # the choice
for weight in model.parameters():
    weight.sum()  # is in memory, not only mapped
tokens = torch.randint(description.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
before, began = peak_memory(), time.perf_counter()
sample_keys(model, description, tokens, list(range(0, length, 32)), moments=True)
print(json.dumps({"before_bytes": before, "peak_bytes": peak_memory(), "seconds": time.perf_counter() - began}))
"""


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--corpus", default="demo")
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 180])
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--long-model", default="demo", help="the model of the long sample")
    parser.add_argument("--length", type=int, default=16_384, help="its tokens")
    arguments = report.parse(parser, corpus="demo-prose", samples=[2, 3], sequence_length=128, length=4096)

    by_samples = [
        {
            "samples": samples,
            "peak_bytes": calibrate(arguments.model, arguments.corpus, samples, arguments.sequence_length),
        }
        for samples in arguments.samples
    ]
    by_pass = [
        {"pass": kind} | run(ONE_PASS, arguments.long_model, str(arguments.length), kind)
        for kind in ("whole", "chunks")
    ]
    for row in (*by_samples, *by_pass):
        print(row)
    settings = report.settings(arguments, ("corpus", "sequence_length", "length"))
    settings |= {name: report.without_folder(getattr(arguments, name)) for name in ("model", "long_model")}
    report.write(arguments.output, {"settings": settings, "by_samples": by_samples, "by_pass": by_pass})


def calibrate(model: str, corpus: str, samples: int, length: int) -> int:
    """Return the peak memory of `bpc calibrate` in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["calibrate", "-m", model, "--corpus", corpus, "--samples", str(samples), "--json", "-q"]
        words += ["--sequence-length", str(length), "-o", f"{folder}/a.safetensors"]
        return int(run("from bpc_cli.main import main; main()", *words)["peak_memory_bytes"])


def run(script: str, *words: str) -> dict[str, Any]:
    """Run Python code in a new process and return the JSON that it prints."""
    done = subprocess.run([sys.executable, "-c", script, *words], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
