"""What projections keep of full attention in contexts shorter than their samples, or longer.

    python benchmarks/sample_lengths.py --model FOLDER --corpus prose=A code=B --held-out prose=C code=D

Calibrates on the same number of tokens in samples of several lengths, with and without a position shift, and decodes
text at several lengths of context: no dense layer, 2 % of the tokens, beside the exact best tokens.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import report

from bpc_artifacts import ProjectionArtifact
from bpc_calib import calibrate, describe, disable, enable, make_plan
from bpc_calib.evaluation.comparison import HARD, Comparison
from bpc_calib.evaluation.evaluate import evaluate
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.text.corpora import open_corpus

FIGURES = ("loss_difference", "kl", "recall", "mass", "best_kept", "cosine")


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--corpus", nargs="+", default=["demo"], help="text to calibrate on")
    parser.add_argument("--held-out", nargs="+", default=["demo"], help="text to decode")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of a calibration")
    parser.add_argument("--samples", type=int, nargs="+", default=[2048, 8192], help="tokens of a sample")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192], help="tokens of a text")
    parser.add_argument("--forced", type=int, default=64)
    parser.add_argument("--texts", type=int, default=4)
    arguments = report.parse(
        parser, tokens=2048, samples=[128, 256], contexts=[128, 256], forced=8, texts=1,
        corpus=["demo-prose"], held_out=["demo-prose"],
    )  # fmt: skip
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    description, texts = describe(model.config), [open_corpus(spec) for spec in arguments.held_out]
    common = Comparison(
        tasks=("text",), lengths=arguments.contexts, budgets=(0.02,), corpora=texts, prompts=arguments.texts,
        forced=arguments.forced, rules=HARD,
    )  # fmt: skip
    rows = list(_rows(model, tokenizer, None, replace(common, methods=("full", "oracle", "bpc-online"))))
    for length in arguments.samples:
        for shift in (False, True):
            if shift and length == description.context_limit:
                continue  # there is nowhere to shift to
            plan = make_plan(
                description, samples=arguments.tokens // length, sequence_length=length, position_shift=shift
            )
            disable(model)
            artifact = calibrate(model, tokenizer, arguments.corpus, plan)
            about = {"samples": length, "position_shift": shift}
            for row in _rows(model, tokenizer, artifact, replace(common, methods=("full", "bpc"))):
                rows.append(about | row)
                print(about, row["tokens"], row["mass"]["value"], row["cosine"]["value"], flush=True)
    settings = report.settings(arguments, ("tokens", "samples", "contexts", "forced", "texts"))
    report.write(arguments.output, {"model": description.id, "settings": settings, "rows": rows})


def _rows(
    model: Any, tokenizer: Any, artifact: ProjectionArtifact | None, comparison: Comparison
) -> Iterator[dict[str, Any]]:
    """A row per context and method, without full attention, which the losses are relative to."""
    enable(model)
    for row in evaluate(model, tokenizer, artifact, comparison, progress=report.progress):
        if row["method"] != "full":
            yield {key: row[key] for key in ("tokens", "method", *FIGURES)}


if __name__ == "__main__":
    main()
