"""What product codes cost beside codes of signs: hashing a prompt and a token, and a decoding step of a layer.

The same time can also buy more of the cache: a step with signs is timed at two budgets.

    python benchmarks/codes_time.py --output codes_time.json

On random keys: the times do not depend on their values. Both kinds are timed in turn, many times, each after other
memory has been written, as between the layers of a model. Expected: hashing takes four times the products of a key, but
no greedy pass; tables take 256 D products per query head in place of 64 D; and a score takes 8 look-ups per key where
signs take products of bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import report
import torch
from interleaved import interleaved

from bpc_calib.backends.dispatch import encode_with, step
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Choice
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.product import Product, Projection
from bpc_calib.method.stepping import Hashed

SHAPES = {"SmolLM2": (3, 3, 64), "Llama-3.1-8B": (8, 4, 128)}  # KV heads, query heads of each, head_dim
BUDGET, MORE = 0.02, 0.05
OTHER = 1 << 26  # bytes written between two calls: more than the caches hold

Calls = dict[str, Callable[[], Any]]


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--repeats", type=int, default=31)
    arguments = report.parse(parser, tokens=[512], repeats=2)
    rows = [row for name in SHAPES for tokens in arguments.tokens for row in measure(name, tokens, arguments.repeats)]
    for row in rows:
        print(row)
    report.write(arguments.output, {"settings": {"budget": BUDGET, "more": MORE, "dtype": "bfloat16"}, "rows": rows})


def measure(name: str, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each work: milliseconds with signs and with product codes, and their ratio."""
    heads, group, dim = SHAPES[name]
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16
    draw = partial(torch.randn, generator=generator)
    signs = draw(heads, 64, dim) * 0.3
    product = Product(torch.linalg.qr(draw(heads, dim, dim)).Q, draw(heads, 8, 256, dim // 8))
    mean, metric = draw(heads, dim), torch.eye(dim).expand(heads, dim, dim).contiguous()
    keys, query = draw(1, heads, tokens, dim).to(dtype), draw(1, heads, group, dim).to(dtype)
    encoders = {
        "signs": make_encoder(signs, dtype, metric=metric, mean=mean),
        "product": make_encoder(product, dtype, mean=mean),
    }
    codes = torch.randint(-(1 << 62), 1 << 62, (1, heads, tokens, 1), generator=generator)
    gain = torch.randint(256, (1, heads, tokens), generator=generator).to(torch.uint8)
    slots = Slots(keys, keys, codes, gain)
    projections: dict[str, Projection] = {"signs": signs.to(dtype), "product": product.to(dtype)}
    choice = Choice(dim**-0.5)
    k, more = (max(1, round(share * tokens)) for share in (BUDGET, MORE))
    hashed = {kind: Hashed(each, encoders[kind], slots, tokens) for kind, each in projections.items()}
    steps: Calls = {kind: partial(step, query, each, k, choice) for kind, each in hashed.items()}
    work: dict[str, Calls] = {
        "hashing the prompt": {kind: partial(encode_with, each, keys) for kind, each in encoders.items()},
        "hashing a token": {kind: partial(encode_with, each, keys[:, :, :1]) for kind, each in encoders.items()},
        "a step": steps | {"signs at 5 %": partial(step, query, hashed["signs"], more, choice)},
    }
    rows, other = [], torch.zeros(OTHER, dtype=torch.uint8)
    for what, calls in work.items():
        times = interleaved(calls, repeats, before=lambda: other.add_(1))
        rows.append(
            {"shape": name, "tokens": tokens, "what": what}
            | {kind: round(1e3 * seconds, 4) for kind, seconds in times.items()}
            | {
                f"ratio of {kind}": round(seconds / times["signs"], 3)
                for kind, seconds in times.items()
                if kind != "signs"
            }
        )
    return rows


if __name__ == "__main__":
    main()
