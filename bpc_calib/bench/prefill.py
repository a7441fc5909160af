"""The cost of hashing: in the prefill of a whole model, and for the keys of one layer."""

import functools
from typing import Any

import torch

from bpc_artifacts import ProjectionArtifact
from bpc_calib.backends import dispatch
from bpc_calib.bench.inputs import ONE, LayerShape, make
from bpc_calib.bench.timing import clock, summary, synchronize
from bpc_calib.compat import with_cache
from bpc_calib.method.defaults import BUDGET
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.enabling import disable, enable
from bpc_calib.runtime.hashed_layer import HASHED_AT_ONCE, BPCLayer

__all__ = ["hashing_row", "prefill_row"]


@torch.inference_mode()
def prefill_row(
    model: Any, artifact: ProjectionArtifact, tokens: int, dense_layers: Any, repeats: int
) -> dict[str, Any]:
    """Measure the prefill of random ids and the hashing of their keys, which the first sparse step does.

    Args:
        model: on the device to measure.
        artifact: projections of the model.
        tokens: length of the prompt.
        dense_layers: indices of the layers that attend to everything.
        repeats: timings, beside a first one that warms up.

    Returns:
        `full`, `bpc` (prefill and hashing) and `hashing`, each with median and spread in seconds, and `hashing_share`,
        the share of hashing in `bpc`.
    """
    device = model.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, tokens), generator=generator).to(device)
    samples: dict[str, list[float]] = {"full": [], "bpc": [], "hashing": []}
    enable(model)
    try:
        for repeat in range(repeats + 1):
            for name, budget in (("full", 1.0), ("bpc", BUDGET)):
                cache = BPCCache(model.config, artifact, budget=budget, dense_layers=dense_layers, min_context=0)
                synchronize(device)
                run = functools.partial(model, ids, **with_cache(cache), use_cache=True, logits_to_keep=1)
                seconds = {name: clock(run, device)}
                if name == "bpc":
                    seconds["hashing"] = clock(functools.partial(hash_all, cache), device)
                    seconds["bpc"] += seconds["hashing"]
                for each, taken in seconds.items() if repeat else ():  # the first repeat is a warm-up
                    samples[each].append(taken)
    finally:
        disable(model)
    seconds_of = {name: summary(values, 4) for name, values in samples.items()}
    share = seconds_of["hashing"]["median"] / seconds_of["bpc"]["median"]
    return {"what": "prefill of the model", "tokens": tokens, **seconds_of, "hashing_share": round(share, 4)}


def hash_all(cache: Any) -> None:
    """Compute the codes of all keys in every layer that chooses tokens."""
    for layer in cache.layers:
        if isinstance(layer, BPCLayer):
            layer.hash(None)


def hashing_row(shape: LayerShape, repeats: int, device: torch.device) -> dict[str, Any]:
    """Measure in seconds the hashing of a prompt's keys in one layer."""
    inputs = make(shape, ONE, device)

    def run() -> None:
        for part in inputs.states[0].keys.split(HASHED_AT_ONCE, dim=2):
            dispatch.find(part).encode_with(inputs.codebook, part)

    run()
    seconds = summary([clock(run, device) for _ in range(repeats)], 5)
    rate = round(shape.tokens * shape.rows / seconds["median"])
    return {"what": "hashing of a layer", "tokens": shape.tokens, "hashing": seconds, "keys_per_second": rate}
