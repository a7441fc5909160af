"""Hash the cached tokens of all layers; online projections of several layers are fitted at once."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bpc_calib.method.fitting import Fit
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.online_fit import Asked, fit_online, fitted_places

__all__ = ["prepare"]

# Heads of one fit: enough for every core of a CPU; with 1,024 keys of 128 numbers in float64 they take 67 MB.
HEADS_AT_ONCE = 64


def prepare(layers: Sequence[BPCLayer], mask: Tensor | None) -> None:
    """Hash what is cached in these layers; the mask is `[batch, N]`, and None where no token is padding.

    Raises:
        InputError: the mask does not fit the cache.
    """
    waiting = [
        layer
        for layer in layers
        if layer.unfitted() and (visible := layer.visible(mask)) is None and layer.will_choose(visible)
    ]
    for together in _alike(waiting):
        for layer, fitted in zip(together, _fit(together), strict=True):
            layer.take_fit(fitted)
    for layer in layers:
        layer.prepare(mask)


def _alike(layers: Sequence[BPCLayer]) -> Iterator[list[BPCLayer]]:
    """Yield groups of layers whose keys and queries have the same shapes."""

    def shapes(layer: BPCLayer) -> tuple[Any, ...]:
        asked = layer.asked
        return layer.keys.shape, layer.keys.dtype, layer.keys.device, None if asked is None else asked.queries.shape

    for _, found in groupby(layers, shapes):
        group = list(found)
        batch, kv_heads = group[0].keys.shape[:2]
        count = max(1, HEADS_AT_ONCE // (batch * kv_heads))
        for start in range(0, len(group), count):
            yield group[start : start + count]


def _fit(layers: Sequence[BPCLayer]) -> list[Fit]:
    """Fit the projections of layers of the same shapes, as if each were a part of the batch."""
    first, rules = layers[0], layers[0].rules
    batch, places = first.keys.shape[0], fitted_places(first.keys.shape[2]).to(first.keys.device)
    asked = None
    if first.asked is not None:
        queries = [layer.asked.queries for layer in layers if layer.asked is not None]
        asked = Asked(torch.cat(queries), first.asked.places)
    keys = torch.cat([layer.keys[:, :, places] for layer in layers])
    fitted = fit_online(keys, asked, None, rules.bits, rules.seed)

    def part(tensor: Tensor | None) -> Sequence[Any]:
        return [None] * len(layers) if tensor is None else tensor.split(batch)

    parts = (part(tensor) for tensor in (fitted.projection, fitted.residual_norms, fitted.metric, fitted.mean))
    return [Fit(*each) for each in zip(*parts, strict=True)]
