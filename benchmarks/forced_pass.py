"""What is lost by attending to some of the tokens: forced decoding of the last tokens of a text, all in one pass.

The newest queries attend to what they choose, those before to everything. That is decoding of given tokens one at a
time behind a dense prefill, with ranks and shares that no cache needs to offer, in a hundredth of the time.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.calibration.needs import TOKENS, code_ranks, visible
from bpc_calib.compat import with_cache
from bpc_calib.method.rules import Rules, ranking_defaults
from bpc_calib.method.scoring import group_scores
from bpc_calib.method.selection import sortable
from bpc_calib.models.observation import observing

__all__ = ["TOKENS", "divergences"]

Case = TypeVar("Case")


@torch.inference_mode()
def divergences(
    model: Any, artifact: ProjectionArtifact, ids: Tensor, cases: Mapping[Case, tuple[bool, Mapping[int, Rules]]]
) -> dict[Case, float]:
    """Return the KL divergence of the next token from full attention's, the mean over the last `TOKENS` of a text.

    Args:
        model: the model of the artifact.
        artifact: its projections.
        ids: integers `[T]`.
        cases: by any key, whether ranks are exact, and the rules of each layer, which say how many are attended.
    """
    from transformers import DynamicCache

    method, ids = ranking_defaults(artifact), ids.unsqueeze(0).to(torch.int64)
    cache = DynamicCache(config=model.config)
    model.base_model(input_ids=ids[:, :-TOKENS], **with_cache(cache))

    def likely(attend: Callable[..., Tensor | None]) -> Tensor:
        with observing(model, attend):
            found = model(input_ids=ids[:, -TOKENS:], **with_cache(copy.deepcopy(cache)))
        return found.logits[0].float().log_softmax(-1)

    full, found = likely(lambda *given: None), {}
    weight = full.exp()
    for case, (exact, rules) in cases.items():

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any], exact: bool = exact,
            rules: Mapping[int, Rules] = rules,
        ) -> Tensor | None:  # fmt: skip
            if (layer := artifact.layers.get(module.layer_idx)) is None:
                return None
            scaling = arguments["scaling"]
            if exact:
                ranks = exact_ranks(query[0], key[0], scaling)
            else:
                ranks = code_ranks(query[0], key[0], layer, method, scaling)
            kept = best(ranks, counts(rules[module.layer_idx], key.shape[2], key.shape[1]))
            return attention(query[0], key[0], value[0], kept, scaling).to(query.dtype)

        found[case] = (weight * (full - likely(attend))).sum(-1).mean().item()
    return found


def counts(rules: Rules, length: int, kv_heads: int) -> Tensor:
    """Return how many tokens each KV head of the newest queries attends to: int64 `[H_KV, TOKENS]`."""
    lengths = range(length - TOKENS + 1, length + 1)
    return torch.tensor([rules.by_head(rules.count(each), each) for each in lengths]).mT.expand(kv_heads, -1)


def exact_ranks(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return how the products rank the keys of a KV head, its group joined: int32 `[H_KV, TOKENS, T]`.

    Args:
        query: `[heads, TOKENS, D]`.
        key: `[H_KV, T, D]`.
        scaling: attention's factor on the products q k.
    """
    seen = visible(key.shape[1], key.device)
    products = query.unflatten(0, (len(key), -1)).transpose(1, 2).float() @ key.float().unsqueeze(1).mT
    ranks = group_scores(products, "relative", valid=seen.unsqueeze(0), logit=torch.tensor(1 / scaling))
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
