"""Does a long answer stay as fast as it began, and does memory grow with the turns of conversations?

    python benchmarks/steady.py --output steady.json

First decodes greedily after a random prompt, with BPC and with the model's own cache: the median time per token in
each block of tokens, and the bytes of the cache. With `--minutes`, then talks: conversations of three turns that
share a cache, with calibrated projections or with those found in the prompt. What matters is that the curve of
resident memory is level.
"""

import gc
import random
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch

from bpc_artifacts import load
from bpc_calib import BPCCache, calibrate, describe, enable, make_plan
from bpc_calib.compat import with_cache
from bpc_calib.models.loading import load_model, load_tokenizer

TURNS, ANSWER, POINTS = 3, 24, 60  # of a conversation; tokens of an answer; of the curve
LENGTHS = (64, 256, 1024, 3000)  # tokens of a turn


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--artifact", "-a", type=Path, help="default: calibrate on made text")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--new", type=int, default=2048, help="tokens")
    parser.add_argument("--block", type=int, default=256, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0.0, help="of conversations")
    arguments = report.parse(parser, prompt=256, new=8, block=4, repeats=1, minutes=0.05)
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    if arguments.artifact:
        artifact = load(arguments.artifact)
    else:
        samples, length = (3, 128) if arguments.tiny else (60, 2048)
        plan = make_plan(describe(model.config), samples=samples, sequence_length=length)
        artifact = calibrate(model, tokenizer, ["demo"], plan)
    enable(model)
    settings = report.settings(arguments, ("prompt", "new", "block", "repeats", "minutes"))
    result: dict[str, Any] = {"settings": settings, "rows": answers(model, artifact, arguments)}
    if arguments.minutes:
        result["conversations"] = talk(model, artifact, arguments.minutes, tiny=arguments.tiny)
    report.write(arguments.output, result)


def answers(model: Any, artifact: Any, arguments: Any) -> list[dict[str, Any]]:
    """A row per cache: for each block, the median over repeats of the median over its tokens."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, arguments.prompt), generator=generator)
    rows = []
    for name, make in {
        "BPC, 2 %": lambda: BPCCache(model.config, artifact, dense_layers=()),
        "full attention": lambda: DynamicCache(config=model.config),
    }.items():
        runs = [decode(model, make(), prompt, arguments.new) for _ in range(arguments.repeats)]
        edges = list(pairwise(range(0, arguments.new + 1, arguments.block)))
        times = [median(median(run["seconds"][a:b]) for run in runs) * 1e3 for a, b in edges]
        row = {"cache": name, "milliseconds_by_block": [round(each, 3) for each in times]}
        rows.append(row | {"last_to_first": round(times[-1] / times[0], 3), **runs[0]["bytes"]})
        print(f"{name}: ms per token, in blocks of {arguments.block}: " + " ".join(f"{each:.2f}" for each in times))
    return rows


@torch.inference_mode()
def decode(model: Any, cache: Any, prompt: torch.Tensor, new: int) -> dict[str, Any]:
    """Seconds per new token, and the bytes of the cache before and after."""
    token = model(prompt, **with_cache(cache), logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    before, seconds = allocated(cache), []
    for _ in range(new):
        start = time.perf_counter()
        token = model(token, **with_cache(cache)).logits[:, -1].argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - start)
    filled = sum(buffer[:, :, : cache.get_seq_length()].nbytes for buffer in buffers(cache))
    sizes = {"after_prompt": before, "at_the_end": allocated(cache), "of_its_tokens": filled}
    return {"seconds": seconds, "bytes": sizes}


def allocated(cache: Any) -> int:
    """Bytes of every buffer of the cache, spare room included."""
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers(cache))


def buffers(cache: Any) -> list[torch.Tensor]:
    held = (getattr(layer, "buffers", {"keys": layer.keys, "values": layer.values}) for layer in cache.layers)
    return [buffer for each in held for buffer in each.values()]


def talk(model: Any, artifact: Any, minutes: float, *, tiny: bool) -> list[dict[str, Any]]:
    """Rows at even intervals: minutes, turns and tokens so far, resident bytes."""
    rng, points = random.Random(0), 3 if tiny else POINTS
    rows: list[dict[str, Any]] = []
    began, turns, tokens = time.monotonic(), 0, 0
    while len(rows) < points:
        cache = BPCCache(model.config, rng.choice([artifact, None]))
        for _ in range(TURNS):
            tokens += turn(model, cache, rng.choice(LENGTHS[:1] if tiny else LENGTHS), rng)
            turns += 1
        del cache
        if (passed := time.monotonic() - began) > 60 * minutes / points * (len(rows) + 1):
            gc.collect()
            about = {"minutes": round(passed / 60, 2), "turns": turns, "tokens": tokens}
            rows.append(about | {"resident_bytes": resident()})
            print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def turn(model: Any, cache: BPCCache, length: int, rng: random.Random) -> int:
    """Say `length` tokens, and let the model answer; return the new tokens in the cache."""
    past = cache.get_seq_length()
    said = torch.tensor([[rng.randrange(model.config.vocab_size) for _ in range(length)]])
    said = torch.cat([torch.zeros(1, past, dtype=torch.int64), said], 1)  # `generate` feeds what is not cached
    count = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER}
    model.generate(said, **with_cache(cache), **count, do_sample=False, pad_token_id=0)
    return cache.get_seq_length() - past


def resident() -> int:
    """Bytes of this process in main memory."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


if __name__ == "__main__":
    main()
