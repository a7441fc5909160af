"""How many keys does a projection need?

Fits projections to more and more keys of some samples, and measures the residual on those keys and on the keys of
other samples, which were kept aside. Few keys are learnt by heart: their own residual is small, that of others is not.

    python benchmarks/key_counts.py --output key_counts_demo.json
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import report
import torch
from torch import Tensor

from bpc_calib import describe, fit
from bpc_calib.calibration.keys import sample_keys
from bpc_calib.calibration.positions import shift_offsets, spread_keys
from bpc_calib.calibration.projection_method import DEFAULT_METHOD, PROJECTION_METHODS
from bpc_calib.method.fitting import mean_key, residual_norms
from bpc_calib.method.metric import score_metric
from bpc_calib.models.description import ModelDescription
from bpc_calib.models.loading import load_config, load_model, load_tokenizer
from bpc_calib.text.corpora import open_corpus
from bpc_calib.text.known_corpora import expand
from bpc_calib.text.samples import draw_samples

METHOD = PROJECTION_METHODS[DEFAULT_METHOD]
ASIDE = 4  # every fourth sample is kept aside

Collected = dict[int, tuple[Tensor, Tensor]]  # by layer: keys [kv_heads, N, D] and moments of queries [kv_heads, D, D]


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--corpus", nargs="+", default=["demo"])
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--keys", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048, 4096, 16384])
    arguments = report.parse(parser, samples=8, sequence_length=64, bits=[32], keys=[16, 256])

    config, commit = load_config(arguments.model)
    model = load_model(arguments.model, revision=commit)
    description = describe(config, revision=commit)
    length, count = arguments.sequence_length, arguments.samples
    corpora = [open_corpus(spec) for spec in expand(arguments.corpus)]
    tokens, _ = draw_samples(
        corpora,
        load_tokenizer(arguments.model, revision=commit),
        samples=count,
        sequence_length=length,
        seed=0,
        vocab_size=description.vocab_size,
    )
    offsets = shift_offsets(count, length, description.context_limit or length, random.Random(0))
    aside = range(ASIDE - 1, count, ASIDE)
    fitted = [number for number in range(count) if number not in aside]
    others = collect(model, description, tokens, offsets, aside, max(arguments.keys))

    rows: list[dict[str, Any]] = []
    for keys in arguments.keys:
        own = collect(model, description, tokens, offsets, fitted, keys)
        for bits in arguments.bits:
            found = [residuals(own[layer], others[layer][0], bits) for layer in description.full_layers]
            means = [float(torch.cat(part).mean()) for part in zip(*found, strict=True)]
            row = dict(zip(("own", "others"), means, strict=True))
            rows.append({"bits": bits, "keys": keys} | {name: round(value, 4) for name, value in row.items()})
            print(
                f"{bits:>4} bits, {keys:>6} keys: {row['own']:.4f} on them, {row['others']:.4f} on others",
                file=sys.stderr,
            )
    settings = report.settings(arguments, ("samples", "sequence_length"))
    settings |= {"fitted_samples": len(fitted), "corpora": [each.name for each in corpora], "method": METHOD.name}
    report.write(arguments.output, {"model": description.id, "settings": settings, "rows": rows})


def collect(
    model: Any, description: ModelDescription, tokens: Tensor, offsets: list[int], chosen: Sequence[int], count: int
) -> Collected:
    """`count` keys of the chosen samples, at positions spread as `bpc calibrate` spreads them."""
    length = tokens.shape[1]
    rows = spread_keys([offsets[number] for number in chosen], length, count, random.Random(count))
    found = [
        sample_keys(model, description, tokens[number], row, offset=offsets[number], moments=True)
        for number, row in zip(chosen, rows, strict=True)
        if row
    ]
    return {
        layer: (
            torch.cat([each.keys[layer] for each in found], dim=1).double(),
            torch.stack([each.moments[layer] for each in found]).sum(0),
        )
        for layer in description.full_layers
    }


def residuals(own: tuple[Tensor, Tensor], others: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The residual of each head on the fitted keys and on others, as a share of their length in the metric."""
    keys, moment = own
    metric = score_metric(moment)
    found = fit(
        keys,
        bits,
        iterations=METHOD.iterations,
        rounds=METHOD.rounds,
        metric=metric,
        mean=mean_key(keys) if METHOD.centred else None,
        generator=torch.Generator().manual_seed(0),
    )
    norms = residual_norms(others, found.projection, metric=metric, mean=found.mean)
    return found.residual_norms[:, -1] / found.residual_norms[:, 0], norms[:, -1] / norms[:, 0]


if __name__ == "__main__":
    main()
