"""Collect keys and second moments of queries: one forward pass per sample, at some of its positions."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bpc_calib.errors import ModelError
from bpc_calib.method.metric import second_moment
from bpc_calib.models.description import ModelDescription
from bpc_calib.models.observation import observing

__all__ = ["collect_keys", "shift_offsets", "spread_positions"]


def collect_keys(
    model: Any,
    description: ModelDescription,
    samples: Tensor,
    *,
    positions: list[list[int]],
    offsets: list[int],
    moments: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Collect the post-RoPE keys of every full-attention layer, and second moments of the queries.

    Runs one sample per forward pass, because the batch size changes the bits of the keys. Keeps only the keys at
    `positions`, so their number limits the memory, not the length of the text.

    Args:
        samples: int64 `[samples, T]`, without padding.
        positions: for each sample, the indices of the tokens whose keys to keep (see `spread_positions`).
        offsets: for each sample, the position of its first token (see `shift_offsets`).
        moments: also sum `q^T q` over the queries at those positions.

    Returns:
        Keys `[kv_heads, N, head_dim]` by layer index, on the CPU, in the model's dtype, `N` the number of all kept
        positions; and the `second_moment` of the queries of each group by layer index, float64
        `[kv_heads, head_dim, head_dim]`, an empty dict without `moments`.

    Raises:
        ModelError: the attention interface did not see a layer, or saw it twice.
    """
    count, length = samples.shape
    total = sum(map(len, positions))
    shape = (description.kv_heads, total, description.head_dim)
    kept = {layer: torch.empty(shape, dtype=model.dtype) for layer in description.full_layers}
    filled = dict.fromkeys(kept, 0)
    summed: dict[int, Tensor] = {}
    wanted = torch.empty(0, dtype=torch.int64)  # the positions of the current sample

    def keep(module: Any, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
        if (layer := module.layer_idx) in kept:
            end = filled[layer] + len(wanted)
            places = wanted.to(key.device)
            kept[layer][:, filled[layer] : end] = key[0].index_select(1, places).to("cpu")
            filled[layer] = end
            if moments:
                queries = query[0].index_select(1, places).to("cpu").unflatten(0, (description.kv_heads, -1))
                moment = second_moment(queries.flatten(1, 2))
                summed[layer] = summed[layer] + moment if layer in summed else moment

    device = model.device
    with observing(model, keep), torch.inference_mode():
        for i in range(count):
            wanted = torch.tensor(positions[i], device=device)
            model.base_model(
                input_ids=samples[i : i + 1].to(device),
                position_ids=torch.arange(offsets[i], offsets[i] + length, device=device).unsqueeze(0),
                use_cache=False,
            )
            progress(i + 1)
    if any(end != total for end in filled.values()):
        raise ModelError(f"{description.id}: some layers bypass transformers' attention interface: {filled}")
    return kept, summed


def shift_offsets(samples: int, length: int, limit: int, rng: random.Random) -> list[int]:
    """Draw the first position of each sample of `length` tokens, from 0 to `limit - length`, denser towards 0.

    Shifted samples have the RoPE rotations of long contexts. Short and long contexts both contain the early
    positions, so these count more: the offset is `room * u^2` with one `u` from each of `samples` equal parts
    of [0, 1). benchmarks/results/position_shift_*.json compares this choice with others.
    """
    room = limit - length
    parts = list(range(samples))
    rng.shuffle(parts)
    return [int((room + 1) * ((part + rng.random()) / samples) ** 2) for part in parts]


def spread_positions(samples: int, length: int, keys: int, rng: random.Random) -> list[list[int]]:
    """Draw ascending positions in `[0, length)` for each sample: one from each of several equal parts.

    All samples together have at most `keys` positions, and the counts of two samples differ by at most one.
    """
    if keys >= samples * length:
        return [list(range(length))] * samples
    chosen = []
    for sample in range(samples):
        parts = keys * (sample + 1) // samples - keys * sample // samples
        edges = [length * part // parts for part in range(parts + 1)] if parts else []
        chosen.append([rng.randrange(*edge) for edge in pairwise(edges)])
    return chosen
