"""Does a long answer stay as fast as it began, and does its cache grow by the new tokens alone?

Decodes greedily after a random prompt, with BPC and with the model's own cache. Prints the median time per token in
each block of tokens, the bytes that the cache has allocated and the bytes of the tokens in it.

    python benchmarks/steady_decode.py --output steady_decode.json
"""

import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import calibrated
import report
import torch

from bpc_calib import BPCCache, enable
from bpc_calib.compat import with_cache
from bpc_calib.models.loading import load_model, load_tokenizer


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--artifact", "-a", type=Path, help="default: calibrate on made text")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--new", type=int, default=2048, help="tokens")
    parser.add_argument("--block", type=int, default=256, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = report.parse(parser, prompt=256, new=8, block=4, repeats=1)

    from transformers import DynamicCache

    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    plan = {"samples": 3 if arguments.tiny else 60, "sequence_length": 128 if arguments.tiny else 2048}
    artifact = calibrated.projections(arguments.artifact, model, tokenizer, ["demo"], **plan)
    enable(model)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, arguments.prompt), generator=generator)
    rows = []
    for name, make in {
        "BPC, 2 %": lambda: BPCCache(model.config, artifact, dense_layers=()),
        "full attention": lambda: DynamicCache(config=model.config),
    }.items():
        runs = [decode(model, make(), prompt, arguments.new) for _ in range(arguments.repeats)]
        # For each block, the median over repeats of the median over its tokens.
        edges = list(pairwise(range(0, arguments.new + 1, arguments.block)))
        times = [median(median(run["seconds"][a:b]) for run in runs) * 1e3 for a, b in edges]
        row = {"cache": name, "milliseconds_by_block": [round(each, 3) for each in times]}
        row |= {"last_to_first": round(times[-1] / times[0], 3), **runs[0]["bytes"]}
        rows.append(row)
        print(f"{name}: ms per token, in blocks of {arguments.block}: " + " ".join(f"{each:.2f}" for each in times))
        print(f"  last block / first {row['last_to_first']:.2f}; bytes {runs[0]['bytes']}")
    settings = report.settings(arguments, ("prompt", "new", "block", "repeats"))
    report.write(arguments.output, {"settings": settings, "rows": rows})


@torch.inference_mode()
def decode(model: Any, cache: Any, prompt: torch.Tensor, new: int) -> dict[str, Any]:
    """Seconds per new token, and the bytes of the cache before and after."""
    token = model(prompt, **with_cache(cache), logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    before = allocated(cache)
    seconds = []
    for _ in range(new):
        start = time.perf_counter()
        token = model(token, **with_cache(cache)).logits[:, -1].argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - start)
    held, filled = allocated(cache), in_use(cache)
    return {"seconds": seconds, "bytes": {"after_prompt": before, "at_the_end": held, "of_its_tokens": filled}}


def allocated(cache: Any) -> int:
    """Bytes of every buffer of the cache."""
    return sum(buffer.untyped_storage().nbytes() for buffer in _buffers(cache))


def in_use(cache: Any) -> int:
    """Bytes of the cached tokens, without spare room."""
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
