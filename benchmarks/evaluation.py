"""Calibrates the bundled model, or another, and compares all methods on it as `bpc eval` does, by default the hard way.

python benchmarks/evaluation.py --lengths 2048 --prompts 300 --output evaluation_2048.json
"""

import argparse
import sys
from pathlib import Path

import report

from bpc_artifacts import load
from bpc_calib import calibrate, describe, enable, make_plan
from bpc_calib.evaluation import HARD, evaluate
from bpc_calib.models.loading import load_config, load_model, load_tokenizer
from bpc_calib.text.corpora import expand, open_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--artifact", "-a", type=Path, help="without one, the model is calibrated on the corpora")
    parser.add_argument("--corpus", nargs="+", default=["demo"])
    parser.add_argument("--tasks", nargs="+", default=["text", "needle"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.02, 0.005])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--samples", type=int, default=180, help="of the calibration")
    parser.add_argument("--sequence-length", type=int, default=2048, help="of the calibration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", "-o", type=Path)
    arguments = parser.parse_args()

    commit = load_config(arguments.model)[1]
    model = load_model(arguments.model, revision=commit)
    tokenizer = load_tokenizer(arguments.model, revision=commit)
    if arguments.artifact:
        artifact = load(arguments.artifact)
    else:
        artifact = calibrate(
            model,
            tokenizer,
            arguments.corpus,
            make_plan(
                describe(model.config),
                samples=arguments.samples,
                sequence_length=arguments.sequence_length,
                seed=arguments.seed,
            ),
        )
    enable(model)
    rows = evaluate(
        model,
        tokenizer,
        artifact,
        tasks=arguments.tasks,
        lengths=arguments.lengths,
        budgets=arguments.budgets,
        methods=arguments.methods,
        prompts=arguments.prompts,
        corpora=[open_corpus(spec) for spec in expand(arguments.corpus)],
        seed=arguments.seed,
        progress=lambda share, what: print(f"\r{share:6.1%} {what}    ", end="", file=sys.stderr, flush=True),
        **HARD,
    )
    print(file=sys.stderr)
    for row in rows:
        figures = {key: value["value"] for key, value in row.items() if isinstance(value, dict) and "value" in value}
        print(row["task"], row["tokens"], row["method"], row["budget"], figures)
    settings = {"tasks": arguments.tasks, "lengths": arguments.lengths, "prompts": arguments.prompts} | HARD
    calibration = {name: artifact.metadata["calibration"][name] for name in ("samples", "sequence_length")}
    calibration |= {"metrics": artifact.metadata["metrics"]["residual"]}
    report.write(arguments.output, {"settings": settings, "calibration": calibration, "rows": rows})


if __name__ == "__main__":
    main()
