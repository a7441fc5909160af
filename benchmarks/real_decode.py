"""Tokens per second on a CPU with a real model: full attention and BPC, and where a step goes.

    python benchmarks/real_decode.py -m FOLDER -a FILE --output real_decode.json

After a prompt of random tokens, every form decodes the same tokens in turn, several times; the medians are compared.
A form's tokens per second count everything behind the prefill: its steps, and the hashing of the prompt. Full attention
runs as transformers does it, and in this project's buffers with SDPA and with the kernel that reads listed tokens. "no
attention" is the same model with zeros in place of attention: the limit of every sparse attention. Every form is timed
twice: with oneDNN, and with torch's own products of a weight with one row. Without a quiet machine, compare processor
times, with one thread.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import calibrated
import report
import torch
from torch import Tensor

from bpc_calib import BPCCache, enable
from bpc_calib.bench.decode import baseline
from bpc_calib.bench.dense import folded
from bpc_calib.compat import with_cache
from bpc_calib.evaluation.forcing import FullLayer
from bpc_calib.models.loading import load_model, load_tokenizer

AT_ONCE = 4  # steps of a form before the next form's turn
PRODUCTS = {"oneDNN": True, "torch's own": False}  # whether torch may use oneDNN
LIMIT = "no attention"


class ListedLayer(FullLayer):
    """A layer whose steps list every token: full attention by BPC's kernel."""

    def count_chosen(self, visible: Tensor | None) -> int:
        return self.get_seq_length()


class ListedCache(BPCCache):
    layer_class = ListedLayer


@dataclass
class Form:
    """A cache filled with the prompt, and what was measured with it."""

    cache: Any
    hashing: float = 0.0  # milliseconds that the first step took beyond the others
    taken: list[tuple[float, float]] = field(default_factory=list)  # milliseconds of a step: wall, processor


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--artifact", "-a", type=Path, help="default: calibrate on made text")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8000], help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens over which the hashing of the prompt is spread")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = report.parse(parser, lengths=[256], new=8, repeats=1)

    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype), load_tokenizer(arguments.model)
    plan = {"samples": 3 if arguments.tiny else 60, "sequence_length": 128 if arguments.tiny else 2048}
    artifact = calibrated.projections(arguments.artifact, model, tokenizer, ["demo"], **plan)
    bandwidth = read_bandwidth(1 << 24 if arguments.tiny else 1 << 30, arguments.repeats)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    print(f"{weights / 1e6:.0f} MB of weights; memory is read at {bandwidth:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths:
        rows += measure(model, artifact, length, arguments.new, arguments.repeats)
    products = {name: round(weights_alone(model, allowed, arguments.repeats), 2) for name, allowed in PRODUCTS.items()}
    print("ms for the products with all weights alone: " + ", ".join(f"{n} {ms:.1f}" for n, ms in products.items()))
    facts = {"weight_bytes": weights, "gb_per_s": bandwidth, "weights_alone_milliseconds": products}
    settings = report.settings(arguments, ("lengths", "new", "repeats", "dtype"))
    report.write(arguments.output, {"settings": settings, **facts, "rows": rows})


@torch.inference_mode()
def measure(model: Any, artifact: Any, length: int, new: int, repeats: int) -> list[dict[str, Any]]:
    """A row per form and kind of products at one length of the prompt, printed as they are made."""
    forms = make_forms(model, artifact, length)
    rows = []
    for products, allowed in PRODUCTS.items():
        for form in forms.values():
            form.taken.clear()
        with torch.backends.mkldnn.flags(enabled=allowed):
            for _ in range(repeats):
                for name, form in forms.items():
                    form.taken += (limit if name == LIMIT else steps)(model, form.cache, length)
        print(f"{length:,} tokens, products by {products}")
        rows += [{"length": length, "products": products, **row} for row in summary(forms, length, new)]
    return rows


def make_forms(model: Any, artifact: Any, length: int) -> dict[str, Form]:
    """The forms, filled by one prefill; those of BPC have hashed the prompt, and were timed at it."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    filled = DynamicCache(config=model.config)
    model(prompt, **with_cache(filled), logits_to_keep=1)
    config = model.config
    caches = {
        "full, transformers": filled,
        "full, growing buffers": BPCCache(config, budget=1.0, dense_layers=()),
        "full, listed tokens": ListedCache(config, budget=1.0, dense_layers=()),
        "BPC": BPCCache(config, artifact),
        "BPC, no dense layers": BPCCache(config, artifact, dense_layers=()),
        LIMIT: BPCCache(config, budget=1.0, dense_layers=()),
    }
    enable(model)
    forms = {}
    for name, cache in caches.items():
        if cache is not filled:
            for index, layer in enumerate(filled.layers):
                cache.update(layer.keys, layer.values, index)
                if hasattr(cache.layers[index], "skip_attention"):
                    cache.layers[index].skip_attention()
        forms[name] = Form(cache)
        warm = steps(model, cache, length)
        if name.startswith("BPC"):
            forms[name].hashing = max(0.0, warm[0][0] - median(wall for wall, _ in warm[1:]))
    return forms


def steps(model: Any, cache: Any, length: int) -> list[tuple[float, float]]:
    """Milliseconds of each of a few steps, wall and processor; the cache forgets their tokens."""
    taken, token = [], torch.tensor([[1]])
    for _ in range(AT_ONCE):
        wall, processor = time.perf_counter(), time.process_time()
        token = model(token, **with_cache(cache)).logits[:, -1].argmax(-1, keepdim=True)
        taken.append(((time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3))
    cache.rewind(length) if isinstance(cache, BPCCache) else cache.crop(-AT_ONCE)
    return taken


def limit(model: Any, cache: Any, length: int) -> list[tuple[float, float]]:
    """`steps` with zeros in place of attention."""
    with baseline(model, folded) as switch:
        switch.free = True
        return steps(model, cache, length)


def summary(forms: dict[str, Form], length: int, new: int) -> Iterator[dict[str, Any]]:
    """The row of every form, which is printed."""
    slowest = None
    for name, form in forms.items():
        wall, processor = (median(each) for each in zip(*form.taken, strict=True))
        seconds = (form.hashing + new * wall) / 1e3
        row = {"form": name, "milliseconds": round(wall, 2), "processor_milliseconds": round(processor, 2)}
        row |= {"hashing_milliseconds": round(form.hashing, 1), "tokens_per_second": round(new / seconds, 2)}
        if isinstance(form.cache, BPCCache):
            row["kv_bytes"] = form.cache.kv_bytes(length)[0]
        slowest = slowest or new / seconds
        print(
            f"  {name:22} {wall:7.1f} ms a step ({processor:.1f} of processors), hashing {form.hashing:.0f} ms: "
            f"{new / seconds:.1f} tokens/s, {new / seconds / slowest:.2f} times transformers' full attention"
        )
        yield row


def read_bandwidth(size: int, repeats: int) -> float:
    """GB/s of a sum over so many bytes."""
    memory = torch.ones(size // 8, dtype=torch.int64)
    return round(size / 1e6 / median(_milliseconds(memory.sum) for _ in range(repeats + 1)), 1)


@torch.inference_mode()
def weights_alone(model: Any, allowed: bool, repeats: int) -> float:
    """Milliseconds for a row times every weight of the linear layers."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {size: torch.ones(1, 1, size, dtype=model.dtype) for size in {layer.in_features for layer in layers}}

    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    with torch.backends.mkldnn.flags(enabled=allowed):
        return median(_milliseconds(run) for _ in range(repeats + 1))


def _milliseconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
