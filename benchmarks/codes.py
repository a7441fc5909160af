"""How near BPC comes to the exact best tokens on real text with codes of signs, and with product codes.

    python benchmarks/codes.py -m FOLDER --corpus prose=A code=B --held-out prose=C code=D --output codes_MODEL.json

Calibrates with each kind of codes on the same text, and decodes held-out text at several budgets and lengths of
context, with no dense layer: the divergence of the predictions from full attention's, the loss, and what is kept of
full attention.
"""

import time
from dataclasses import replace
from typing import Any

import report

from bpc_calib import calibrate, describe, disable, enable, make_plan
from bpc_calib.evaluation.comparison import HARD, Comparison
from bpc_calib.evaluation.evaluate import evaluate
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.text.corpora import open_corpus

FIGURES = ("kl", "loss_difference", "recall", "mass", "best_kept", "cosine")


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--corpus", nargs="+", default=["demo"], help="text to calibrate on")
    parser.add_argument("--held-out", nargs="+", default=["demo"], help="text to decode")
    parser.add_argument("--codes", nargs="+", default=["signs", "product"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192], help="tokens of a text")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.02, 0.01, 0.005])
    parser.add_argument("--forced", type=int, default=64)
    parser.add_argument("--texts", type=int, default=4)
    arguments = report.parse(
        parser, samples=4, sequence_length=256, contexts=[256], budgets=[0.1], forced=8, texts=1,
        corpus=["demo-prose"], held_out=["demo-prose"],
    )  # fmt: skip
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    description = describe(model.config)
    common = Comparison(
        tasks=("text",), lengths=arguments.contexts, budgets=arguments.budgets, forced=arguments.forced, rules=HARD,
        corpora=[open_corpus(spec) for spec in arguments.held_out], prompts=arguments.texts,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for codes in arguments.codes:
        plan = make_plan(description, samples=arguments.samples, sequence_length=arguments.sequence_length, codes=codes)
        disable(model)
        began = time.perf_counter()
        artifact = calibrate(model, tokenizer, arguments.corpus, plan)
        print(f"{codes}: calibrated in {time.perf_counter() - began:.0f} s", flush=True)
        enable(model)
        methods = ("full", "bpc") if rows else ("full", "oracle", "bpc")  # the first time with the exact best
        for row in evaluate(model, tokenizer, artifact, replace(common, methods=methods), progress=report.progress):
            if row["method"] != "full":
                name = codes if row["method"] == "bpc" else "exact"
                kept = {key: row[key] for key in ("tokens", "budget", *FIGURES, "read")}
                rows.append({"codes": name, "bits": plan.bits} | kept)
                print({key: rows[-1][key] for key in ("codes", "tokens", "budget", "kl", "mass", "cosine")}, flush=True)
    names = ("samples", "sequence_length", "contexts", "budgets", "forced", "texts")
    report.write(
        arguments.output, {"model": description.id, "settings": report.settings(arguments, names), "rows": rows}
    )


if __name__ == "__main__":
    main()
