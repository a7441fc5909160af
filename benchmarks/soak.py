"""Does memory grow with the number of turns? Conversations one after the other in one process, for an hour.

A conversation has three turns that share a cache, with the projections of a file or those found in the prompt, and
prompts of changing length. The resident memory is noted at even intervals; what matters is that its curve is level.

    python benchmarks/soak.py --output soak.json
"""

import gc
import random
import time
from pathlib import Path
from typing import Any

import calibrated
import report
import torch

from bpc_calib import BPCCache, enable
from bpc_calib.compat import with_cache
from bpc_calib.models.loading import load_model, load_tokenizer

TURNS, NEW = 3, 24  # of a conversation; tokens of an answer
LENGTHS = (64, 256, 1024, 3000)  # tokens of a turn


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--artifact", "-a", type=Path, help="default: calibrate on made text")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--points", type=int, default=60, help="of the curve")
    arguments = report.parse(parser, minutes=0.05, points=3)
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    plan = {"samples": 3 if arguments.tiny else 60, "sequence_length": 128 if arguments.tiny else 2048}
    artifact = calibrated.projections(arguments.artifact, model, tokenizer, ["demo"], **plan)
    enable(model)
    rng = random.Random(0)
    every = arguments.minutes * 60 / arguments.points
    rows: list[dict[str, Any]] = []
    began, turns, tokens = time.monotonic(), 0, 0
    while len(rows) < arguments.points:
        cache = BPCCache(model.config, rng.choice([artifact, None]))
        for _ in range(TURNS):
            tokens += turn(model, cache, rng.choice(LENGTHS[:1] if arguments.tiny else LENGTHS), rng)
            turns += 1
        del cache
        if (passed := time.monotonic() - began) > every * (len(rows) + 1):
            gc.collect()
            row = {"minutes": round(passed / 60, 2), "turns": turns, "tokens": tokens, "resident_bytes": resident()}
            rows.append(row)
            print(f"{row['minutes']:6.1f} min, {turns:,} turns: {row['resident_bytes'] / 2**20:,.0f} MiB", flush=True)
    settings = report.settings(arguments, ("minutes", "points")) | {"turns": TURNS, "new": NEW, "lengths": LENGTHS}
    report.write(arguments.output, {"settings": settings, "rows": rows})


@torch.inference_mode()
def turn(model: Any, cache: BPCCache, length: int, rng: random.Random) -> int:
    """Say `length` tokens, and let the model answer; return the new tokens in the cache."""
    past = cache.get_seq_length()
    said = torch.tensor([[rng.randrange(model.config.vocab_size) for _ in range(length)]])
    said = torch.cat([torch.zeros(1, past, dtype=torch.int64), said], 1)  # `generate` feeds what is not cached
    model.generate(said, **with_cache(cache), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return cache.get_seq_length() - past


def resident() -> int:
    """Bytes of this process in main memory."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


if __name__ == "__main__":
    main()
