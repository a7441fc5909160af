"""How many keys per KV head a projection wants: the next token's distribution beside full attention's.

Calibrates a model with each number of keys, then forces held-out text token by token through full attention, through
the exact best tokens and through BPC with each projection, no layer dense.

    python benchmarks/keys_per_head.py -m SmolLM2-135M-Instruct --corpus prose=... code=... --text held-out/*/* \\
        --output keys_per_head_smollm2.json
"""

import json
import sys
from pathlib import Path
from statistics import stdev
from typing import Any

import report
import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib import calibrate, describe, enable, make_plan
from bpc_calib.evaluation.comparison import HARD, make_cache
from bpc_calib.evaluation.forcing import force, fork, prefill
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.text.samples import beginning

SEED = 0


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--corpus", nargs="+", default=["demo"], help="calibration text")
    parser.add_argument("--text", nargs="+", type=Path, help="held-out files; each gives one text")
    parser.add_argument("--keys", nargs="+", type=int, default=[1024, 4096, 16_384, 65_536])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.02, 0.01, 0.005])
    parser.add_argument("--samples", type=int, default=35)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of each text before the forced ones")
    parser.add_argument("--tokens", type=int, default=32, help="forced tokens per text")
    arguments = report.parse(
        parser, keys=[256, 512], budgets=[0.1], samples=3, sequence_length=256, prefix=128, tokens=2,
        text=[Path(__file__)],
    )  # fmt: skip
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    description = describe(model.config)
    texts = read_texts(tokenizer, arguments.text, arguments.prefix + arguments.tokens)
    artifacts: dict[str, ProjectionArtifact | None] = {"exact": None}
    for keys in arguments.keys:
        plan = make_plan(
            description,
            samples=arguments.samples,
            sequence_length=arguments.sequence_length,
            keys_per_head=keys,
            seed=SEED,
        )
        artifacts[f"{keys:,}"] = calibrate(model, tokenizer, arguments.corpus, plan)
        print(f"calibrated with {keys:,} keys per KV head", file=sys.stderr)
    enable(model)
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for done, ids in enumerate(texts, start=1):
        for place, pair in compare(model, ids, arguments.prefix, artifacts, arguments.budgets).items():
            found.setdefault(place, []).append(pair)
        print(f"{done} of {len(texts)} texts", file=sys.stderr)
    rows = [
        {"keys": name, "budget": budget, **summary([kl for kl, _ in pairs], [loss for _, loss in pairs])}
        for (name, budget), pairs in found.items()
    ]
    print(json.dumps(rows, indent=2))
    names = ("samples", "sequence_length", "prefix", "tokens", "keys", "budgets")
    report.write(
        arguments.output,
        {"model": description.id, "texts": len(texts), "settings": report.settings(arguments, names), "rows": rows},
    )


def read_texts(tokenizer: Any, files: list[Path], length: int) -> list[Tensor]:
    """The first `length` tokens of each file, `[1, length]`; files with less are left out."""
    start = beginning(tokenizer)
    texts = []
    for file in files:
        ids = tokenizer(file.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) + len(start) >= length:
            texts.append(torch.tensor([(start + ids)[:length]]))
    return texts


def compare(
    model: Any, ids: Tensor, prefix: int, artifacts: dict[str, ProjectionArtifact | None], budgets: list[float]
) -> dict[tuple[str, float], tuple[float, float]]:
    """Mean KL divergence from full attention and mean loss of likelihood over the forced tokens, by name and budget."""
    filled = prefill(model, ids[:, : prefix - 1])
    full = logarithms(model, fork(filled, BPCCache(model.config, budget=1.0, dense_layers=())), ids[:, prefix - 1 :])
    result = {}
    for name, artifact in artifacts.items():
        for budget in budgets:
            method = "oracle" if artifact is None else "bpc"
            cache = fork(filled, make_cache(method, model.config, artifact, budget, **HARD))
            other = logarithms(model, cache, ids[:, prefix - 1 :])
            divergence = (full.exp() * (full - other)).sum(-1)
            lost = (full - other).gather(-1, ids[0, prefix:, None])
            result[name, budget] = (float(divergence.mean()), float(lost.mean()))
    return result


def logarithms(model: Any, cache: BPCCache, ids: Tensor) -> Tensor:
    """Log-probabilities after each token but the last, float64 `[tokens - 1, vocabulary]`."""
    rows = [force(model, cache, ids[:, place : place + 1]) for place in range(ids.shape[1] - 1)]
    return torch.cat(rows).double().log_softmax(-1)


def summary(divergences: list[float], losses: list[float]) -> dict[str, float]:
    """Means over texts, and their standard errors."""
    result = {}
    for name, values in (("kl", divergences), ("loss", losses)):
        result[name] = round(sum(values) / len(values), 4)
        result[f"{name}_error"] = round(stdev(values) / len(values) ** 0.5, 4) if len(values) > 1 else 0.0
    return result


if __name__ == "__main__":
    main()
