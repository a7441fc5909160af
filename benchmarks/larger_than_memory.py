"""Tokens per second where keys and values lie in a file, and memory has no room for all of them.

    python benchmarks/larger_than_memory.py -o RESULT                            # in memory
    systemd-run --user --scope -p MemoryMax=4500M -p MemorySwapMax=0 \\
        python benchmarks/larger_than_memory.py --kv-device disk:FOLDER --limit "4.5 GB" -o RESULT

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

SHAPE, TOKENS, STEPS, DRIFTS = "llama-3.2-1b", 131_072, 16, (1.0, 0.3, 0.1)


class Watched(BPCLayer):
    """Keeps what the last step chose."""

    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """As without it."""
        out, self.chosen = super().decode(query, rows)
        return out, self.chosen


def again(before: list[Tensor], now: list[Tensor]) -> float:
    """Return the share of the tokens chosen now, `[1, kv_heads, width]` per layer, that were chosen before."""
    shift = torch.arange(now[0].shape[1]).view(1, -1, 1) << 32
    pairs = ([(each + shift)[each >= 0] for each in pair] for pair in zip(now, before, strict=True))
    return statistics.mean(float(torch.isin(*pair).float().mean()) for pair in pairs)


def read_bytes() -> int:
    """Return the bytes that this process had the disk read so far."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes: ")[2].split()[0])


@torch.inference_mode()
def measure(model: Any, cache: Any, drift: float, steps: int) -> dict[str, Any]:
    """Decode; return medians over the steps: seconds, bytes read, and what was chosen again."""
    generator, state, rows = torch.Generator().manual_seed(1), None, []
    before: list[Tensor] = []
    for _ in range(steps):
        noise = torch.randn(1, 1, model.config.hidden_size, generator=generator)
        state = (1 - drift**2) ** 0.5 * (noise if state is None else state) + drift * noise
        began, read = time.perf_counter(), read_bytes()
        model(inputs_embeds=state.to(model.dtype), **with_cache(cache), use_cache=True)
        row = {"seconds": time.perf_counter() - began, "read_bytes": read_bytes() - read}
        now = [each.chosen for each in cache.layers]
        rows.append(row | {"again": again(before or now, now)})
        before = now
    counted = rows[max(1, len(rows) // 4) :]
    return {name: statistics.median(row[name] for row in counted) for name in counted[0]}


def main() -> None:
    """Measure BPC and full attention."""
    parser = make_parser(__doc__)
    parser.add_argument("--kv-device", help="as BPCCache takes it")
    parser.add_argument("--limit", help="of memory, for the record: it is set outside")
    asked = parser.parse_args()
    shape, layers, tokens, steps = ("2x64x2", 2, 600, 4) if asked.tiny else (SHAPE, None, TOKENS, STEPS)
    config, device = shape_config(shape, layers), torch.device("cpu")
    model, kind = random_model(config, torch.bfloat16, device), type("Cache", (BPCCache,), {"layer_class": Watched})
    enable(model)
    if not asked.tiny:
        compile_layers(model)
    cache = kind(config, random_artifact(config), min_context=0, kv_device=asked.kv_device)
    fill(cache, config, 1, tokens, model.dtype, device)
    cache.prepare()
    os.sync()
    rows = [{"method": "BPC", "drift": drift} | measure(model, cache, drift, steps) for drift in DRIFTS]
    with cache.full_attention():
        rows.append({"method": "full attention"} | measure(model, cache, 1.0, max(2, steps // 4)) | {"again": None})
    run = {"kv_device": "disk" if asked.kv_device else None, "limit": asked.limit, "tokens": tokens, "rows": rows}
    held = json.loads(asked.output.read_text())["runs"] if asked.output and asked.output.exists() else []
    print(json.dumps(rows, indent=1))
    keep(asked.output, {"runs": [*held, about() | run]})


if __name__ == "__main__":
    main()
