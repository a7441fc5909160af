"""What the metric, centring, the gain and the rule for a group cost: in hashing a prompt or a token, and in a step.

    python benchmarks/hashing_time.py --output hashing_time.json

Ratios within one run: all forms are timed in turn, many times, and their medians compared. Expected: a metric adds a
product of [N, D] and [D, D] to one of [N, D] and [D, H] and 64 greedy steps; the gain adds one byte to 8 per key.
"""

import functools
from collections.abc import Callable

import report
import torch
from interleaved import interleaved
from transformers import LlamaConfig

from bpc_artifacts import LayerProjection
from bpc_calib import describe
from bpc_calib.method.encoding import encode_with, make_encoder
from bpc_calib.method.fitting import fit, mean_key
from bpc_calib.method.metric import query_metric, second_moment
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.rules import Rules

HEADS, GROUP = 8, 4


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = report.parse(parser, tokens=512, head_dims=[64], repeats=1)
    rows = []
    for dim in arguments.head_dims:
        for dtype in (torch.float32, torch.bfloat16):
            rows += measure(arguments.tokens, dim, dtype, arguments.repeats)
    for row in rows:
        print(row)
    report.write(arguments.output, {"settings": {"kv_heads": HEADS, "group": GROUP}, "rows": rows})


def measure(tokens: int, dim: int, dtype: torch.dtype, repeats: int) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, HEADS, tokens, dim, generator=generator) * torch.logspace(0, -1, dim)
    queries = torch.randn(1, HEADS * GROUP, 1, dim, generator=generator).to(dtype)
    metric = query_metric(second_moment(torch.randn(HEADS, 500, dim, generator=generator)), 0.25)
    some = keys[0, :, :4096]
    found = fit(some, iterations=2, metric=metric, mean=mean_key(some))
    assert found.mean is not None
    keys = keys.to(dtype)
    forms = {"paper": (None, None), "metric": (metric, None), "metric, centred": (metric, found.mean)}
    encoders = {
        name: make_encoder(found.projection, dtype, metric=metric, mean=mean) for name, (metric, mean) in forms.items()
    }

    def hashing(part: torch.Tensor) -> dict[str, Callable[[], object]]:
        return {name: functools.partial(encode_with, encoder, part) for name, encoder in encoders.items()}

    model = describe(LlamaConfig(num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS, head_dim=dim))
    calibrated = LayerProjection(
        found.projection.numpy(), found.residual_norms.float().numpy(), metric.numpy(), found.mean.numpy()
    )

    def step(gain: bool, group: str) -> Callable[[], object]:
        rules = Rules(0.02, 128, 0.0, 0, 0, group, gain, 64, 0)
        layer = BPCLayer(0, rules, model, calibrated)
        layer.update(keys, keys)
        layer.hash(None)

        def decode() -> None:
            layer.update(keys[:, :, :1], keys[:, :, :1])
            layer.attend(queries, layer.count(layer.get_seq_length()), None, None)
            layer.crop(-1)

        return decode

    steps = {
        "no gain, relative": step(False, "relative"),
        "no gain, max": step(False, "max"),
        "gain, max": step(True, "max"),
        "gain, relative": step(True, "relative"),
    }
    prompt = hashing(keys)
    rows: list[dict[str, object]] = []
    for what, kinds in (
        (f"hashing {tokens:,} tokens", prompt),
        ("hashing 1 token", hashing(keys[:, :, :1])),
        (f"a step after {tokens:,} tokens", steps),
    ):
        times = interleaved(kinds, repeats if kinds is prompt else 5 * repeats)
        first = next(iter(times.values()))
        rows += [
            {
                "what": what,
                "head_dim": dim,
                "dtype": str(dtype).removeprefix("torch."),
                "form": name,
                "milliseconds": round(1e3 * seconds, 4),
                "ratio": round(seconds / first, 3),
            }
            for name, seconds in times.items()
        ]
    return rows


if __name__ == "__main__":
    main()
