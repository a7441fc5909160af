"""Forced decoding: a dense prefill of the prefix, then one decoding step per token.

A measurement in a single prefill never decodes, so it cannot test a cache. The prefix is computed once and copied to
every cache under comparison.
"""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bpc_calib.backends.dispatch import find
from bpc_calib.compat import with_cache
from bpc_calib.method.state import Rows, alike
from bpc_calib.models.finite import check_finite
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.call import AttentionCall
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import GrowingLayer, SparseLayer
from bpc_calib.runtime.online_fit import Asked, join

__all__ = [
    "FullLayer",
    "PrefixLayer",
    "compare",
    "complete",
    "force",
    "fork",
    "keep",
    "log_likelihoods",
    "predictions",
    "prefill",
]

IMPOSSIBLE = -1e4  # in place of the logarithm of 0


class FullLayer(SparseLayer):
    """A layer that chooses every token."""

    def rows(self, call: AttentionCall) -> Rows:
        """Return the sequences of a step, of which batches must not be padded."""
        return alike(self.keys, self.keys.shape[2])

    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Attend to all tokens."""
        state = self.state()
        chosen = torch.arange(rows.longest, device=query.device).expand(*query.shape[:2], -1)
        return find(query, state).dense_decode(query, state, rows, self.rules.scaling), chosen


class PrefixLayer(FullLayer):
    """A layer that attends to everything and keeps queries of a step with several tokens, for methods that use them."""

    asked: Asked | None = None

    def observe(self, query: Tensor, scaling: float | None, places: Tensor) -> None:
        self.asked = join(None, query, places)
        self.scale(scaling)


class PrefixCache(BPCCache):
    layer_class = PrefixLayer


@torch.inference_mode()
def prefill(model: Any, ids: Tensor) -> PrefixCache:
    """Run `ids` `[batch, prefix]` through an enabled model in one dense step; return the filled cache.

    Raises:
        ModelError: its predictions are no numbers.
    """
    cache = PrefixCache(model.config, budget=1.0, dense_layers=(), min_context=0)
    check_finite(model(input_ids=ids, **with_cache(cache), logits_to_keep=1).logits, model)
    return cache


def fork(prefix: PrefixCache, cache: BPCCache) -> BPCCache:
    """Copy a prefix into an empty cache, as if the cache itself had run the prefill; return the cache."""
    for index, source in enumerate(prefix.layers):
        if not isinstance(source, GrowingLayer):
            cache.layers[index] = copy.deepcopy(source)  # a sliding-window layer
            continue
        cache.update(source.keys, source.values, index)
        layer = cache.layers[index]
        if isinstance(layer, SparseLayer) and isinstance(source, PrefixLayer):
            layer.skip_attention()
            if source.asked is not None:
                layer.observe(source.asked.queries, source.rules.scaling, source.asked.places)
        if isinstance(layer, BPCLayer) and layer.calibrated is not None:
            layer.prepare(None)  # so that the first step is like the others
    return cache


@torch.inference_mode()
def force(model: Any, cache: BPCCache, ids: Tensor) -> Tensor:
    """Feed `ids` `[batch, tokens]` one token at a time; return the logits `[batch, vocabulary]` after the last."""
    logits = torch.empty(0)
    for token in ids.split(1, dim=1):
        logits = model(input_ids=token, **with_cache(cache)).logits[:, -1]
    return logits


@torch.inference_mode()
def complete(model: Any, cache: BPCCache, ids: Tensor, new: int) -> Tensor:
    """Feed the tokens one at a time, then decode and return greedy tokens, int64 `[batch, new]`.

    Args:
        model: an enabled model.
        cache: holds the tokens before `ids`.
        ids: int64 `[batch, tokens]`.
        new: number of tokens to decode.
    """
    tokens = [force(model, cache, ids).argmax(-1, keepdim=True)]
    while len(tokens) < new:
        tokens.append(force(model, cache, tokens[-1]).argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


@torch.inference_mode()
def log_likelihoods(model: Any, cache: BPCCache, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of every token except the first, given the cache and the tokens before it.

    Each token is fed in a step of its own.

    Returns:
        float32 `[batch, tokens - 1]`, and bool of the same shape: whether the token was the most likely one.
    """
    likely, greedy = [], []
    for predicted, wanted in predictions(model, cache, ids):
        likely.append(predicted.gather(-1, wanted))
        greedy.append(predicted.argmax(-1, keepdim=True) == wanted)
    return torch.cat(likely, dim=1), torch.cat(greedy, dim=1)


@torch.inference_mode()
def predictions(model: Any, cache: BPCCache, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Feed all tokens but the last, one at a time; yield log-probabilities, and the token that follows.

    The log-probabilities are float32 `[batch, vocabulary]`, and the token is `[batch, 1]`.
    """
    for token, wanted in pairwise(ids.split(1, dim=1)):
        yield force(model, cache, token).float().log_softmax(-1), wanted


@torch.inference_mode()
def keep(model: Any, cache: BPCCache, ids: Tensor) -> list[Tensor]:
    """Return the `predictions` for every token of `ids` `[batch, tokens]` except the first, to compare others with.

    They are float16 on the CPU: an error of 2^-11 of each logarithm, which counts as much as its probability.
    """
    return [predicted.to("cpu", torch.float16) for predicted, _ in predictions(model, cache, ids)]


class Compared(NamedTuple):
    """Forced tokens beside full attention, float64 `[batch]` on the CPU; NaN without predictions to compare with."""

    likelihood: Tensor  # mean log-likelihood of the tokens except the first
    divergence: (
        Tensor  # mean Kullback-Leibler divergence of full attention's prediction of these from this one, in nats
    )
    agreement: Tensor  # share of these whose most likely token is full attention's


@torch.inference_mode()
def compare(model: Any, cache: BPCCache, ids: Tensor, kept: Sequence[Tensor]) -> Compared:
    """Force `ids` `[batch, tokens]` through a cache, and compare it with the predictions of full attention.

    Args:
        model: an enabled model.
        cache: holds the tokens before `ids`.
        ids: int64 `[batch, tokens]`.
        kept: of the same ids, by `keep`; none: nothing to compare with.
    """
    likely, apart, same = [], [], []
    for place, (predicted, wanted) in enumerate(predictions(model, cache, ids)):
        likely.append(predicted.gather(-1, wanted).squeeze(-1))
        if kept:
            rounded = kept[place].to(predicted).log_softmax(-1)  # probabilities that add up to 1 again
            full, own = (each.clamp(min=IMPOSSIBLE) for each in (rounded, predicted))
            apart.append((full.exp() * (full - own)).sum(-1))
            # Rounded predictions may have several best tokens: each counts as full attention's.
            same.append(
                (rounded.gather(-1, own.argmax(-1, keepdim=True)) == rounded.amax(-1, keepdim=True)).squeeze(-1)
            )
    likelihood, *others = (torch.stack(each).double().mean(0).cpu() for each in (likely, apart, same) if each)
    unknown = torch.full_like(likelihood, torch.nan)
    return Compared(likelihood, *(others or (unknown, unknown)))
