"""What fitting the projections of one layer takes: the compiled kernels beside plain torch, in alternation.

python benchmarks/fitting_time.py --output fitting_time.json
"""

import json
import sys
import time
from statistics import median
from typing import Any

import report
import torch
from torch import Tensor

from bpc_calib import query_metric, second_moment
from bpc_calib.backends.cpu import backend
from bpc_calib.method import fitting

# KV heads, keys per head, head_dim: SmolLM2-135M on 24 samples of 2,048 tokens, Llama 3.1 8B and Gemma 3 270M.
SHAPES = [(3, 49_152, 64), (8, 65_536, 128), (1, 65_536, 256)]
BITS, ITERATIONS, ROUNDS = 64, 8, 6  # the method `score-aware`


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keys", type=int, help="keys per head, in place of those of each shape")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = report.parse(parser, repeats=1, keys=600)
    torch.set_num_threads(arguments.threads)
    rows = [measure(heads, arguments.keys or keys, dim, arguments.repeats) for heads, keys, dim in SHAPES]
    print(json.dumps(rows, indent=2))
    settings = report.settings(arguments, ("repeats", "keys", "threads"))
    report.write(arguments.output, {"settings": settings, "rows": rows})


def measure(heads: int, count: int, dim: int, repeats: int) -> dict[str, Any]:
    keys = made_keys(heads, count, dim)
    metric = query_metric(second_moment(keys[:, :2048].float()), 0.25)
    ways = {"torch": fitting.fit, "numba": backend.fit}
    backend.fit(keys[:, :512], BITS, rounds=1)  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for _ in range(repeats):
        for name, fit in ways.items():
            start = time.perf_counter()
            found[name] = fit(
                keys, BITS, iterations=ITERATIONS, rounds=ROUNDS, metric=metric, mean=fitting.mean_key(keys)
            )
            seconds[name].append(time.perf_counter() - start)
    middle = {name: median(each) for name, each in seconds.items()}
    operations = heads * count * (BITS * ITERATIONS * 2 * dim + (ROUNDS + 1) * BITS * (4 * dim + BITS))
    row = {
        "kv_heads": heads,
        "keys_per_head": count,
        "head_dim": dim,
        "torch_seconds": round(middle["torch"], 3),
        "numba_seconds": round(middle["numba"], 3),
        "speedup": round(median(a / b for a, b in zip(seconds["torch"], seconds["numba"], strict=True)), 2),
        "same_bytes": torch.equal(found["torch"].projection, found["numba"].projection),
        "gflops_at_least": round(operations / middle["numba"] / 1e9, 1),  # products alone
    }
    print(row, file=sys.stderr)
    return row


def made_keys(heads: int, count: int, dim: int) -> Tensor:
    """Keys with directions of unequal strength and a mean, bfloat16 `[heads, count, dim]`."""
    generator = torch.Generator().manual_seed(0)
    strength = torch.logspace(0.5, -1, dim)
    keys = torch.randn(heads, count, dim, generator=generator) * strength
    return (keys + torch.randn(heads, 1, dim, generator=generator)).bfloat16()


if __name__ == "__main__":
    main()
