"""Does the position shift let short samples serve long contexts?

Calibrates on short samples with and without the shift, then asks in long contexts how many of the true best
2 % of the keys are among the best 2 % by codes.

    python benchmarks/position_shift.py --model MODEL --corpus NAME=PATH
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

from bpc_calib import calibrate, describe, encode, hash_scores, quantize_query
from bpc_calib.corpora import open_corpus
from bpc_calib.models import load_config, load_model, load_tokenizer
from bpc_calib.observation import observing
from bpc_calib.samples import draw_samples

QUERIES = 64  # the last positions of a context ask, the positions before them are ranked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", "-m", required=True)
    parser.add_argument("--corpus", action="append", required=True)
    parser.add_argument("--short", type=int, default=256, help="tokens of a calibration sample")
    parser.add_argument("--long", type=int, default=2048, help="tokens of a context")
    parser.add_argument("--samples", type=int, default=180)
    parser.add_argument("--contexts", type=int, default=12)
    parser.add_argument("--budget", type=float, default=0.02)
    parser.add_argument("--output", "-o", type=Path)
    arguments = parser.parse_args()

    config, commit = load_config(arguments.model)
    model = load_model(arguments.model, revision=commit)
    tokenizer = load_tokenizer(arguments.model, revision=commit)
    description = describe(config, revision=commit)
    corpora = [open_corpus(spec) for spec in arguments.corpus]
    # Another seed gives other text than calibration saw, but for what a small corpus repeats.
    contexts, _ = draw_samples(
        corpora,
        tokenizer,
        samples=arguments.contexts,
        sequence_length=arguments.long,
        seed=1,
        vocab_size=description.vocab_size,
    )
    seen = [watch(model, context) for context in contexts]

    rows = []
    for length, shift in ((arguments.short, False), (arguments.short, True), (arguments.long, False)):
        print(f"calibrating on {length} tokens, shift {'on' if shift else 'off'} ...", file=sys.stderr)
        artifact = calibrate(
            model,
            tokenizer,
            corpora=corpora,
            samples=arguments.samples,
            sequence_length=length,
            position_shift=shift,
        )
        for gain in (False, True):
            by_layer = {
                layer: sum(
                    recall(*each[layer], torch.from_numpy(held.projection), arguments.budget, gain) for each in seen
                )
                / len(seen)
                for layer, held in artifact.layers.items()
            }
            rows.append(
                {
                    "sequence_length": length,
                    "position_shift": shift,
                    "gain": gain,
                    "recall": round(sum(by_layer.values()) / len(by_layer), 4),
                    "recall_by_layer": {str(layer): round(value, 4) for layer, value in by_layer.items()},
                }
            )

    print(f"recall of the true best {arguments.budget:.1%} in contexts of {arguments.long} tokens")
    print(f"{'calibrated on':>14} {'shift':>6} {'gain':>5} {'recall':>7}  by layer")
    for row in rows:
        layers = " ".join(f"{value:.3f}" for value in row["recall_by_layer"].values())
        print(
            f"{row['sequence_length']:>14} {'on' if row['position_shift'] else 'off':>6} "
            f"{'on' if row['gain'] else 'off':>5} {row['recall']:>7.3f}  {layers}"
        )
    settings = {name: getattr(arguments, name) for name in ("short", "long", "samples", "contexts", "budget")}
    report.write(arguments.output, {"model": description.id, "settings": settings, "rows": rows})


def watch(model: Any, context: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries `[kv_heads, G, QUERIES, D]` and the keys before them `[kv_heads, N, D]` by layer."""
    seen = {}

    def keep(module: Any, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
        asking = query[0, :, -QUERIES:].unflatten(0, (key.shape[1], -1))
        seen[module.layer_idx] = (asking.clone(), key[0, :, :-QUERIES].clone())

    with observing(model, keep), torch.inference_mode():
        model.base_model(input_ids=context.unsqueeze(0), use_cache=False)
    return seen


def recall(queries: Tensor, keys: Tensor, projection: Tensor, budget: float, gain: bool) -> float:
    """Share of the true best keys among the best by codes, mean over query heads and queries."""
    k = int(budget * keys.shape[1])
    encoded = encode(keys, projection)
    # One query at a time shares its scale with its group, as in decoding.
    quantized = quantize_query(queries.movedim(2, 0), projection)
    scores = hash_scores(quantized, encoded.codes, encoded.gain if gain else None)  # [QUERIES, kv_heads, G, N]
    truth = queries.movedim(2, 0).float() @ keys.float().mT
    best = torch.zeros_like(truth, dtype=torch.bool).scatter_(-1, truth.topk(k).indices, True)
    return float(best.gather(-1, scores.topk(k).indices).float().mean())


if __name__ == "__main__":
    main()
