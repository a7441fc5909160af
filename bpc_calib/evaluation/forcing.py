"""Decoding that decodes: a dense prefix, then every token in a step of its own.

What is measured in one prefill never decodes, so it says nothing about a cache. The prefix is computed once and
copied to every cache that is compared.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.layers import GrowingLayer, SparseLayer

__all__ = ["FullLayer", "complete", "force", "fork", "log_likelihoods", "prefill"]

QUERIES = 64  # the last ones of a prefix, kept for methods that look at them


class FullLayer(SparseLayer):
    """Chooses every token."""

    def choose(self, query: Tensor, k: int | Tensor, visible: Tensor | None) -> Tensor:
        """All tokens, padding too: for batches without any."""
        return torch.arange(self.get_seq_length(), device=query.device).expand(*self.keys.shape[:2], -1)


class PrefixLayer(FullLayer):
    """Attends to everything, and keeps the last queries of a step of several tokens."""

    queries: Tensor | None = None
    scale: float | None = None

    def observe(self, query: Tensor, scale: float | None) -> None:
        self.queries, self.scale = query[:, :, -QUERIES:].clone(), scale


class PrefixCache(BPCCache):
    layer_class = PrefixLayer


@torch.inference_mode()
def prefill(model: Any, ids: Tensor) -> PrefixCache:
    """Run `ids` `[batch, prefix]` through an enabled model in one dense step."""
    cache = PrefixCache(model.config, budget=1.0, dense_layers=())
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache


def fork(prefix: PrefixCache, cache: BPCCache) -> BPCCache:
    """Give an empty cache what the prefix holds, as if it had seen the prefill itself; returns it."""
    for index, known in enumerate(prefix.layers):
        if not isinstance(known, GrowingLayer):
            cache.layers[index] = copy.deepcopy(known)  # a sliding window
            continue
        cache.update(known.keys, known.values, index)
        layer = cache.layers[index]
        if isinstance(layer, SparseLayer) and isinstance(known, PrefixLayer):
            layer.skip_attention()
            if known.queries is not None:
                layer.observe(known.queries, known.scale)
    return cache


@torch.inference_mode()
def force(model: Any, cache: BPCCache, ids: Tensor) -> Tensor:
    """Feed `ids` `[batch, tokens]` one at a time; the logits `[batch, vocabulary]` after the last."""
    logits = torch.empty(0)
    for token in ids.split(1, dim=1):
        logits = model(input_ids=token, past_key_values=cache).logits[:, -1]
    return logits


@torch.inference_mode()
def complete(model: Any, cache: BPCCache, ids: Tensor, new: int) -> Tensor:
    """Feed `ids` one at a time, then `new` tokens `[batch, new]` greedily, each by itself too."""
    found = [force(model, cache, ids).argmax(-1, keepdim=True)]
    while len(found) < new:
        found.append(force(model, cache, found[-1]).argmax(-1, keepdim=True))
    return torch.cat(found, dim=1)


@torch.inference_mode()
def log_likelihoods(model: Any, cache: BPCCache, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of every token but the first, each fed by itself and given all before it, cached and fed.

    Returns:
        float32 `[batch, tokens - 1]`, and bool of the same shape: whether the token was the likeliest.
    """
    likely, greedy = [], []
    for place in range(ids.shape[1] - 1):
        logits = force(model, cache, ids[:, place : place + 1]).float()
        wanted = ids[:, place + 1, None]
        likely.append(logits.log_softmax(-1).gather(-1, wanted))
        greedy.append(logits.argmax(-1, keepdim=True) == wanted)
    return torch.cat(likely, dim=1), torch.cat(greedy, dim=1)
