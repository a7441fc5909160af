"""Does a long answer stay as fast as it began, and does its cache grow by the new tokens alone?

Decodes greedily after a random prompt, with BPC and with the model's own cache, and prints the median time of a token
in each block of tokens, and the bytes that the cache has allocated and those of the tokens in it.

    python benchmarks/steady_decode.py --output steady_decode.json
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch

from bpc_artifacts import load
from bpc_calib import BPCCache, calibrate, describe, enable, make_plan
from bpc_calib.models.loading import load_model, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--artifact", "-a", type=Path, help="without one, the model is calibrated on made text")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--new", type=int, default=2048, help="tokens")
    parser.add_argument("--block", type=int, default=256, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", "-o", type=Path)
    arguments = parser.parse_args()

    from transformers import DynamicCache

    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    if arguments.artifact:
        artifact = load(arguments.artifact)
    else:
        plan = make_plan(describe(model.config), samples=60, sequence_length=2048)
        artifact = calibrate(model, tokenizer, ["demo"], plan)
    enable(model)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, arguments.prompt), generator=generator)
    rows = []
    for name, make in {
        "BPC, 2 %": lambda: BPCCache(model.config, artifact, dense_layers=()),
        "full attention": lambda: DynamicCache(config=model.config),
    }.items():
        runs = [decode(model, make(), prompt, arguments.new) for _ in range(arguments.repeats)]
        # Block by block: the median over repeats of the block's median.
        edges = list(pairwise(range(0, arguments.new + 1, arguments.block)))
        times = [median(median(run["seconds"][a:b]) for run in runs) * 1e3 for a, b in edges]
        row = {"cache": name, "milliseconds_by_block": [round(each, 3) for each in times]}
        row |= {"last_to_first": round(times[-1] / times[0], 3), **runs[0]["bytes"]}
        rows.append(row)
        print(f"{name}: ms a token by blocks of {arguments.block}: " + " ".join(f"{each:.2f}" for each in times))
        print(f"  last to first {row['last_to_first']:.2f}; bytes {runs[0]['bytes']}")
    settings = {name: getattr(arguments, name) for name in ("prompt", "new", "block", "repeats")}
    report.write(arguments.output, {"settings": settings, "rows": rows})


@torch.inference_mode()
def decode(model: Any, cache: Any, prompt: torch.Tensor, new: int) -> dict[str, Any]:
    """Seconds of each new token, and bytes of the cache before and after."""
    token = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    before = allocated(cache)
    seconds = []
    for _ in range(new):
        start = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - start)
    held, filled = allocated(cache), in_use(cache)
    return {"seconds": seconds, "bytes": {"after_prompt": before, "at_the_end": held, "of_its_tokens": filled}}


def allocated(cache: Any) -> int:
    """Bytes of every buffer of the cache."""
    return sum(buffer.untyped_storage().nbytes() for buffer in _buffers(cache))


def in_use(cache: Any) -> int:
    """Of these, the bytes of cached tokens."""
    length = cache.get_seq_length()
    return sum(buffer[:, :, :length].numel() * buffer.element_size() for buffer in _buffers(cache))


def _buffers(cache: Any) -> list[torch.Tensor]:
    return [
        buffer
        for layer in cache.layers
        for buffer in getattr(layer, "buffers", {"keys": layer.keys, "values": layer.values}).values()
    ]


if __name__ == "__main__":
    main()
