"""Collecting keys and what queries ask of them: one forward pass a sample, a share of its positions kept."""

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
    """Post-RoPE keys of every full-attention layer, on the CPU, in the model's dtype, and moments of its queries.

    One sample a forward pass, since the size of a batch changes the bits of keys. Only the wanted keys
    are kept, so memory is bounded by their number, not by the text.

    Args:
        samples: int64 `[samples, T]`, without padding.
        positions: for each sample, the places in it whose keys are kept (see `spread_positions`).
        offsets: for each sample, the position of its first token (see `shift_offsets`).
        moments: whether to sum `q^T q` over the queries at those positions too.

    Returns:
        Keys `[kv_heads, N, head_dim]` by layer index, `N` the number of all wanted positions, and `second_moment`
        of the queries of each group, float64 `[kv_heads, head_dim, head_dim]`; empty unless asked for.

    Raises:
        ModelError: a layer was not seen by the attention interface, or seen twice.
    """
    count, length = samples.shape
    total = sum(map(len, positions))
    shape = (description.kv_heads, total, description.head_dim)
    kept = {layer: torch.empty(shape, dtype=model.dtype) for layer in description.full_layers}
    filled = dict.fromkeys(kept, 0)
    summed: dict[int, Tensor] = {}
    wanted = torch.empty(0, dtype=torch.int64)  # the positions of the sample under way

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
    """For each sample of `length` tokens a first position, from 0 to `limit - length`, denser towards 0.

    Shifted samples show the rotations of RoPE that long contexts use. A token early in the context is
    part of short and long contexts alike, so early positions count more: the offset is `room * u^2` with
    one `u` from each of equal stretches of [0, 1). Compared in benchmarks/results/position_shift_*.json.
    """
    room = limit - length
    stretches = list(range(samples))
    rng.shuffle(stretches)
    return [int((room + 1) * ((stretch + rng.random()) / samples) ** 2) for stretch in stretches]


def spread_positions(samples: int, length: int, keys: int, rng: random.Random) -> list[list[int]]:
    """For each sample ascending positions in `[0, length)`: one drawn from each of equal stretches.

    Together at most `keys`, and evenly: no sample has more than one position more than another.
    """
    if keys >= samples * length:
        return [list(range(length))] * samples
    chosen = []
    for sample in range(samples):
        parts = keys * (sample + 1) // samples - keys * sample // samples
        edges = [length * part // parts for part in range(parts + 1)] if parts else []
        chosen.append([rng.randrange(*edge) for edge in pairwise(edges)])
    return chosen
