"""What nibbles cost beside signs: a step of a layer, its scores, and hashing, in turn on the same random keys.

    python benchmarks/nibbles_time.py -o RESULT

On one thread. Scores contain what a step does before them, the products of the query. Codes are drawn, so no text
decides the times.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from report import about, keep, make_parser

from bpc_calib.backends.dispatch import find
from bpc_calib.bench.inputs import LayerInputs, LayerShape, Sets, make, working_sets
from bpc_calib.bench.layer import step
from bpc_calib.bench.stages import stages_of
from bpc_calib.bench.timing import timed
from bpc_calib.method.budget import attended
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.defaults import BUDGET

SHAPES = {"Llama 3.1 8B": (8, 4, 128), "SmolLM2-135M": (3, 3, 64)}  # KV heads, query heads of each, head_dim
LENGTHS, PROMPT, REPEATS = (8192, 32768, 131072), 8192, 9
CPU = torch.device("cpu")


def of_nibbles(inputs: LayerInputs) -> LayerInputs:
    """Return the same inputs with a codebook of nibbles in place of signs."""
    signs, generator = inputs.codebook, torch.Generator().manual_seed(0)
    heads, bits, dim = signs.projection.shape[-3:]
    vectors = 0.3 * torch.randn(heads, 4 * bits, dim, generator=generator)
    metric = torch.eye(dim).expand(heads, dim, dim)
    dtype, mean = inputs.query.dtype, torch.zeros(heads, dim)
    return replace(inputs, codebook=make_codebook(vectors, dtype, metric=metric, mean=mean, nibbles=True))


def calls_of(inputs: LayerInputs, k: int, sets: Sets) -> dict[str, list[Callable[[], Any]]]:
    """Return what is timed, by name; each step and each scoring reads other keys and codes."""
    rows, keys = inputs.rows(k), inputs.states[0].keys
    score = stages_of(inputs.query, inputs.codebook, rows, inputs.rules)[0]["score"]
    hashed = partial(find(keys).encode_with, inputs.codebook)
    return {
        "step": [partial(step, inputs, state, rows) for state in inputs.states[: sets.steps]],
        "score": [partial(score, state) for state in inputs.states[: sets.codes]],
        "hash a token": [partial(hashed, keys[:, :, -1:])] * sets.steps,
        "hash a prompt": [partial(hashed, keys[:, :, :PROMPT])],
    }


def in_turn(forms: dict[str, list[Callable[[], Any]]], repeats: int) -> dict[str, list[float]]:
    """Return microseconds per call of each form; end this script with the reason why one was not timed."""
    samples = {}
    for name, found in timed(forms, repeats, CPU).items():
        if isinstance(found, str):
            sys.exit(f"{name}: {found}")
        samples[name] = found
    return samples


def main() -> None:
    """Measure all shapes and lengths; print and keep the medians, and those of the ratios of each turn."""
    parser = make_parser(__doc__)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lengths, repeats = ((512,), 1) if asked.tiny else (LENGTHS, REPEATS)
    rows = []
    for model, (heads, group, dim) in SHAPES.items():
        for tokens in lengths:
            shape, k = LayerShape(1, heads, group, dim, tokens, torch.bfloat16), attended(tokens, BUDGET)
            sets = working_sets(shape, k, CPU)
            signs = make(shape, sets, CPU)
            kinds = {"signs": calls_of(signs, k, sets), "nibbles": calls_of(of_nibbles(signs), k, sets)}
            names = [(name, kind) for name in kinds["signs"] for kind in kinds]
            taken = in_turn({f"{kind} {name}": kinds[kind][name] for name, kind in names}, repeats)
            for name in kinds["signs"]:
                ours, theirs = (taken[f"{kind} {name}"] for kind in kinds)
                row = {"model": model, "tokens": tokens, "what": name, "signs": round(median(ours), 1)}
                row |= {"nibbles": round(median(theirs), 1)}
                row |= {"ratio": round(median(b / a for a, b in zip(ours, theirs, strict=True)), 3)}
                rows.append(row)
                print(row, flush=True)
    keep(asked.output, about() | {"unit": "microseconds", "budget": BUDGET, "prompt": PROMPT, "rows": rows})


if __name__ == "__main__":
    main()
