"""What is lost by attending to some of the tokens: forced decoding of the last tokens of a text, all in one pass.

The newest queries attend to what they choose, those before to everything. That is decoding of given tokens one at a
time behind a dense prefill, with ranks and shares that no cache needs to offer, in a hundredth of the time.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bpc_artifacts import LayerProjection, ProjectionArtifact
from bpc_calib.calibration.needs import TOKENS, code_ranks, code_scores, visible
from bpc_calib.compat import with_cache
from bpc_calib.method.encoded import GAIN_UNIT
from bpc_calib.method.metric import adapted
from bpc_calib.method.rules import Rules, ranking_defaults
from bpc_calib.method.scoring import RELATIVE_LIMIT, group_scores
from bpc_calib.method.selection import sortable
from bpc_calib.models.observation import observing
from bpc_calib.runtime.online_fit import Asked, observed_places, prompt_metric

__all__ = ["TOKENS", "divergences"]

Case = TypeVar("Case")


class Way(NamedTuple):
    """How keys are ranked, and how many are attended."""

    artifact: ProjectionArtifact | None  # whose codes rank; None: exact products do
    below_best: bool  # distances count below a head's best score, as they once did, not below its denominator
    rules: Mapping[int, Rules]  # of each layer
    adapted: bool = False  # whether the text before the last tokens adapts the codes, as a prompt does


@torch.inference_mode()
def divergences(model: Any, ids: Tensor, cases: Mapping[Case, Way]) -> dict[Case, float]:
    """Return the KL divergence of the next token from full attention's, the mean over the last `TOKENS` of a text.

    Args:
        model: the model of all artifacts.
        ids: integers `[T]`.
        cases: by any key.
    """
    from transformers import DynamicCache

    ids = ids.unsqueeze(0).to(torch.int64)
    cache, asked = DynamicCache(config=model.config), {}

    def ask(module: Any, query: Tensor, *given: Any) -> None:
        places = observed_places(query.shape[2])
        asked[module.layer_idx] = Asked(query[:, :, places], places)

    with observing(model, ask):
        model.base_model(input_ids=ids[:, :-TOKENS], **with_cache(cache))

    def likely(attend: Callable[..., Tensor | None]) -> Tensor:
        with observing(model, attend):
            found = model(input_ids=ids[:, -TOKENS:], **with_cache(copy.deepcopy(cache)))
        return found.logits[0].float().log_softmax(-1)

    @functools.cache  # many cases rank by the same codes
    def layers_of(artifact: ProjectionArtifact | None, adapts: bool) -> Mapping[int, LayerProjection]:
        own = {} if artifact is None else artifact.layers
        return {index: adapted_layer(each, asked[index]) for index, each in own.items()} if adapts else own

    full, found = likely(lambda *given: None), {}
    weight = full.exp()
    for case, way in cases.items():
        layers = layers_of(way.artifact, way.adapted)

        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            arguments: Mapping[str, Any],
            way: Way = way,
            layers: Mapping[int, LayerProjection] = layers,
        ) -> Tensor | None:
            if module.layer_idx not in way.rules:
                return None
            scaling = arguments["scaling"]
            if way.artifact is None:
                ranks = exact_ranks(query[0], key[0], scaling, way.below_best)
            else:
                layer, method = layers[module.layer_idx], ranking_defaults(way.artifact)
                ranks = ranks_of_codes(query[0], key[0], layer, method, scaling, way.below_best)
            kept = best(ranks, counts(way.rules[module.layer_idx], key.shape[2], key.shape[1]))
            return attention(query[0], key[0], value[0], kept, scaling).to(query.dtype)

        found[case] = (weight * (full - likely(attend))).sum(-1).mean().item()
    return found


def adapted_layer(layer: LayerProjection, asked: Asked) -> LayerProjection:
    """Return the layer with the metric in which the queries of a prompt count, too."""
    assert layer.metric is not None
    prompt = prompt_metric(asked, len(layer.metric), None)[0]
    return replace(layer, metric=adapted(torch.from_numpy(layer.metric), prompt).numpy())


def counts(rules: Rules, length: int, kv_heads: int) -> Tensor:
    """Return how many tokens each KV head of the newest queries attends to: int64 `[H_KV, TOKENS]`."""
    lengths = range(length - TOKENS + 1, length + 1)
    return torch.tensor([rules.by_head(rules.count(each), each) for each in lengths]).mT.expand(kv_heads, -1)


def ranks_of_codes(
    query: Tensor, key: Tensor, layer: LayerProjection, method: Mapping[str, Any], scaling: float, old: bool
) -> Tensor:
    """Return `code_ranks`, or with the `old` rule distances below a head's best score."""
    if not old:
        return code_ranks(query, key, layer, method, scaling)
    scores, scale, gain = code_scores(query, key, layer, method)
    logit = (GAIN_UNIT if gain else 1) / (scale * scaling)
    return below_best(scores.float(), logit[..., None, None])


def exact_ranks(query: Tensor, key: Tensor, scaling: float, below: bool) -> Tensor:
    """Return how the products rank the keys of a KV head, its group joined: int32 `[H_KV, TOKENS, T]`.

    Args:
        query: `[heads, TOKENS, D]`.
        key: `[H_KV, T, D]`.
        scaling: attention's factor on the products q k.
        below: see `Way`.
    """
    seen = visible(key.shape[1], key.device)
    products = query.unflatten(0, (len(key), -1)).transpose(1, 2).float() @ key.float().unsqueeze(1).mT
    if below:
        return below_best(products, torch.tensor(1 / scaling))
    ranks = group_scores(products, "relative", valid=seen.unsqueeze(0), logit=torch.tensor(1 / scaling))
    return sortable(ranks.masked_fill(~seen, float("-inf")))


def below_best(scores: Tensor, logit: Tensor) -> Tensor:
    """Return ranks by distances below each head's best score: int32 `[H_KV, TOKENS, T]` of `[H_KV, TOKENS, G, T]`."""
    seen = visible(scores.shape[-1], scores.device)
    below = scores - scores.masked_fill(~seen.unsqueeze(1), float("-inf")).amax(-1, keepdim=True)
    ranks = 4 * scores.shape[-2] * below.amax(-2) + below.maximum(-RELATIVE_LIMIT * logit).sum(-2)
    return sortable(ranks.masked_fill(~seen, float("-inf")))


def best(ranks: Tensor, counts: Tensor) -> Tensor:
    """Return which keys are among the best, of equal ones the first: bool `[H_KV, TOKENS, T]` of int32."""
    length = ranks.shape[-1]
    order = ranks.to(torch.int64) * length - torch.arange(length)  # no two are equal
    ascending = torch.from_numpy(np.sort(order.numpy(), -1))  # NumPy sorts integers several times as fast as torch
    return order >= ascending.gather(-1, (length - counts).unsqueeze(-1))


def attention(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, scaling: float) -> Tensor:
    """Return attention to some of the keys: `[1, TOKENS, heads, D]`."""
    logits = query.unflatten(0, (len(key), -1)).float() @ key.float().unsqueeze(1).mT * scaling
    weights = logits.masked_fill(~kept.unsqueeze(1), float("-inf")).softmax(-1)
    return (weights @ value.float().unsqueeze(1)).flatten(0, 1).transpose(0, 1).unsqueeze(0)
