"""Tokens per second where keys and values lie in a file, and memory has no room for all of them.

    python benchmarks/larger_than_memory.py -o RESULT                            # in memory
    systemd-run --user --scope -p MemoryMax=4500M -p MemorySwapMax=0 \\
        python benchmarks/larger_than_memory.py --kv-device disk:FOLDER -o RESULT

Each run adds its rows to the file. The limit is set outside of the script, since it counts the pages of files, too.
Weights, projections, keys and values of the shape of Llama 3.2 1B are random. The hidden states of successive steps are
a random walk: with a `drift` of 1 each is drawn anew, below 1 it is a mixture with the one before. `again` is the share
of the tokens of a step that the step before chose, too.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from report import about, keep, make_parser
from torch import Tensor

from bpc_calib import BPCCache, compile_layers, enable
from bpc_calib.bench.decode import fill
from bpc_calib.bench.random_models import random_artifact, random_model, shape_config
from bpc_calib.compat import with_cache
from bpc_calib.method.state import Rows
from bpc_calib.runtime.hashed_layer import BPCLayer

SHAPE = "llama-3.2-1b"
DRIFTS = (1.0, 0.3, 0.1)


class Watched(BPCLayer):
    """Keeps what the last step chose."""

    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """As `BPCLayer.decode`."""
        out, self.chosen = super().decode(query, rows)
        return out, self.chosen


def again(before: list[Tensor], now: list[Tensor]) -> float:
    """Return the share of the tokens chosen now, `[batch, kv_heads, width]` per layer, that were chosen before."""
    shares = []
    for old, new in zip(before, now, strict=True):
        marks = torch.zeros(*new.shape[:2], int(max(old.max(), new.max())) + 2, dtype=torch.bool)
        marks.scatter_(2, old + 1, True)
        shares.append(float(marks.gather(2, new + 1)[new >= 0].float().mean()))
    return statistics.mean(shares)


def read_bytes() -> int:
    """Return the bytes that this process had the disk read so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


@torch.inference_mode()
def measure(model: Any, cache: Any, drift: float, steps: int) -> dict[str, Any]:
    """Decode; return medians over the steps: seconds, bytes read, and what was chosen again."""
    generator, state, rows, chosen = torch.Generator().manual_seed(1), None, [], []
    for _ in range(steps):
        noise = torch.randn(1, 1, model.config.hidden_size, generator=generator)
        state = noise if state is None else (1 - drift**2) ** 0.5 * state + drift * noise
        began, read = time.perf_counter(), read_bytes()
        model(inputs_embeds=state.to(model.dtype), **with_cache(cache), use_cache=True)
        row = {"seconds": time.perf_counter() - began, "read_bytes": read_bytes() - read}
        before, chosen = chosen, [each.chosen for each in cache.layers if getattr(each, "chosen", None) is not None]
        rows.append(row | ({"again": again(before, chosen)} if before else {}))
    counted = rows[max(1, len(rows) // 4) :]
    return {name: statistics.median(row[name] for row in counted) for name in counted[-1]}


def main() -> None:
    """Measure BPC, and with a file also full attention."""
    parser = make_parser(__doc__)
    parser.add_argument("--kv-device", help="as BPCCache takes it")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--steps", type=int, default=24)
    asked = parser.parse_args()
    shape, layers, tokens, steps = ("2x64x2", 2, 600, 4) if asked.tiny else (SHAPE, None, asked.tokens, asked.steps)
    config, device = shape_config(shape, layers), torch.device("cpu")
    model = random_model(config, torch.bfloat16, device)
    enable(model)
    if not asked.tiny:
        compile_layers(model)
    cache = type("WatchedCache", (BPCCache,), {"layer_class": Watched})(
        config, random_artifact(config), min_context=0, kv_device=asked.kv_device
    )
    fill(cache, config, 1, tokens, model.dtype, device)
    cache.prepare()
    os.sync()
    rows = [{"method": "BPC", "drift": drift} | measure(model, cache, drift, steps) for drift in DRIFTS]
    with cache.full_attention():
        rows.append({"method": "full attention"} | measure(model, cache, 1.0, max(2, steps // 4)) | {"again": None})
    run = about() | {"kv_device": "disk" if asked.kv_device else "memory", "tokens": tokens, "rows": rows}
    held = json.loads(asked.output.read_text())["runs"] if asked.output and asked.output.exists() else []
    print(json.dumps(rows, indent=1))
    keep(asked.output, {"runs": [*held, run]})


if __name__ == "__main__":
    main()
