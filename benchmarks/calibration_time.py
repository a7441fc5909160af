"""What calibration costs beyond the forward passes, which it cannot do without.

Alternates several times between the bare forward passes over the samples and the whole `bpc calibrate` in its own
process: start, imports, text, forward passes, decomposition, file.

    python benchmarks/calibration_time.py --output calibration_time.json
"""

import json
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import report
import torch

from bpc_calib import describe
from bpc_calib.models.loading import load_config, load_model, load_tokenizer
from bpc_calib.text.corpora import open_corpus
from bpc_calib.text.known_corpora import expand
from bpc_calib.text.samples import draw_samples


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--corpus", nargs="+", default=["demo"])
    parser.add_argument("--samples", type=int, default=180)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = report.parse(parser, samples=3, sequence_length=128, repeats=1)

    config, commit = load_config(arguments.model)
    model = load_model(arguments.model, revision=commit)
    samples, _ = draw_samples(
        [open_corpus(spec) for spec in expand(arguments.corpus)],
        load_tokenizer(arguments.model, revision=commit),
        samples=arguments.samples,
        sequence_length=arguments.sequence_length,
        seed=0,
        vocab_size=describe(config).vocab_size,
    )
    command = [sys.executable, "-c", "from bpc_cli.main import main; main()", "calibrate", "-m", arguments.model]
    command += ["--samples", str(arguments.samples), "--sequence-length", str(arguments.sequence_length)]
    command += ["--json", "-q"]
    for spec in arguments.corpus:
        command += ["--corpus", spec]
    bare: list[float] = []
    whole: list[float] = []
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.repeats):
            start = time.perf_counter()
            with torch.inference_mode():
                for sample in samples:
                    model.base_model(input_ids=sample.unsqueeze(0), use_cache=False)
            bare.append(time.perf_counter() - start)
            start = time.perf_counter()
            words = [*command, "-o", f"{folder}/{i}.safetensors"]
            results.append(json.loads(subprocess.run(words, capture_output=True, check=True).stdout))
            whole.append(time.perf_counter() - start)
            print(
                f"run {i + 1}: bare forward passes {bare[-1]:.1f} s, bpc calibrate {whole[-1]:.1f} s", file=sys.stderr
            )
    rows = {
        "bare_forward_seconds": round(median(bare), 2),
        "calibrate_seconds": round(median(whole), 2),
        "beyond_bare_seconds": round(median(w - b for w, b in zip(whole, bare, strict=True)), 2),
        "seconds_by_stage": {
            s: median(r["seconds_by_stage"][s] for r in results) for s in results[0]["seconds_by_stage"]
        },
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in results),
        "runs": {"bare": [round(x, 2) for x in bare], "calibrate": [round(x, 2) for x in whole]},
    }
    settings = report.settings(arguments, ("samples", "sequence_length", "repeats"))
    print(json.dumps(rows, indent=2))
    report.write(arguments.output, {"model": describe(config).id, "settings": settings, "result": rows})


if __name__ == "__main__":
    main()
