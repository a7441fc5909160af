"""Compare all methods on the bundled model, or another, as `bpc eval` does, in the hard setting.

python benchmarks/evaluation.py --lengths 2048 --prompts 300 --output evaluation_2048.json
"""

from pathlib import Path

import calibrated
import report

from bpc_calib import enable
from bpc_calib.evaluation.comparison import HARD, Comparison
from bpc_calib.evaluation.evaluate import evaluate
from bpc_calib.models.loading import load_config, load_model, load_tokenizer
from bpc_calib.text.corpora import open_corpus
from bpc_calib.text.known_corpora import expand


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--artifact", "-a", type=Path, help="default: calibrate on the corpora")
    parser.add_argument("--corpus", nargs="+", default=["demo"])
    parser.add_argument("--tasks", nargs="+", default=["text", "needle"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.02, 0.005])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--samples", type=int, default=180, help="of calibration text")
    parser.add_argument("--sequence-length", type=int, default=2048, help="of these samples, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    tiny = {"lengths": [512], "budgets": [0.02], "prompts": 2, "samples": 3, "sequence_length": 128}
    arguments = report.parse(parser, **tiny)

    commit = load_config(arguments.model)[1]
    model = load_model(arguments.model, revision=commit)
    tokenizer = load_tokenizer(arguments.model, revision=commit)
    plan = report.settings(arguments, ("samples", "sequence_length", "seed"))
    artifact = calibrated.projections(arguments.artifact, model, tokenizer, arguments.corpus, **plan)
    enable(model)
    comparison = Comparison(
        tasks=arguments.tasks,
        lengths=arguments.lengths,
        budgets=arguments.budgets,
        methods=arguments.methods,
        prompts=arguments.prompts,
        corpora=[open_corpus(spec) for spec in expand(arguments.corpus)],
        seed=arguments.seed,
        rules=HARD,
    )

    rows = evaluate(model, tokenizer, artifact, comparison, progress=report.progress)
    for row in rows:
        figures = {key: value["value"] for key, value in row.items() if isinstance(value, dict) and "value" in value}
        print(row["task"], row["tokens"], row["method"], row["budget"], figures)
    settings = report.settings(arguments, ("tasks", "lengths", "prompts")) | HARD
    calibration = {name: artifact.metadata["calibration"][name] for name in ("samples", "sequence_length")}
    calibration |= {"metrics": artifact.metadata["metrics"]["residual"]}
    report.write(arguments.output, {"settings": settings, "calibration": calibration, "rows": rows})


if __name__ == "__main__":
    main()
