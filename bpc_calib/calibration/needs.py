"""What each KV head needs: its loss by share of the tokens, measured on text, for the shares of a budget.

A layer's sensitivity is the Kullback-Leibler divergence of the next token where that layer alone attends to `REFERENCE`
of the tokens. It is split among the layer's heads, and over the shares of `GRID`, by how much the attention's output
changes behind the output projection: this weighs a head by what the layer passes on.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpc_artifacts import LayerProjection, ProjectionArtifact
from bpc_artifacts.schema import NEEDS_VERSION
from bpc_calib.compat import with_cache
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.codebook import codebook_of
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.rules import ranking_defaults
from bpc_calib.method.scoring import hash_scores, quantize_query
from bpc_calib.method.shares import GRID
from bpc_calib.method.step import rank
from bpc_calib.models.observation import input_device, observing

__all__ = ["REFERENCE", "TOKENS", "text_needs", "with_needs"]

REFERENCE = 0.02
TOKENS = 128  # the newest tokens of a text, at which needs are measured
EVERY = 4  # of these tokens, one in so many gives the curve by share; all give the sensitivity


def with_needs(
    model: Any,
    artifact: ProjectionArtifact,
    tokens: Tensor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ProjectionArtifact:
    """Return the artifact with what each KV head needs, the mean over some texts.

    A text takes as many passes of `TOKENS` tokens over a cached prefix as there are layers.

    Args:
        model: the model of the artifact.
        artifact: its projections.
        tokens: integers `[texts, T]`, with more than `TOKENS` tokens each; best such text as the projections come from.
        progress: is called with the number of finished texts and of all.

    Raises:
        InputError: the texts are too short.
        ModelError: the artifact has layers that the attention interface did not see.
    """
    if tokens.dim() != 2 or not len(tokens) or tokens.shape[1] <= TOKENS:
        raise InputError(f"tokens must be [texts, T] with more than {TOKENS} tokens each, not {list(tokens.shape)}")
    measured = []
    for done, text in enumerate(tokens):
        progress(done, len(tokens))
        measured.append(text_needs(model, artifact, text))
    progress(len(tokens), len(tokens))
    layers = {}
    for layer, found in artifact.layers.items():
        need: NDArray[np.float32] = torch.stack([each[layer] for each in measured]).mean(0).float().numpy()
        layers[layer] = replace(found, need=need)
    return ProjectionArtifact(layers, {**artifact.metadata, "format_version": NEEDS_VERSION})


@torch.inference_mode()
def text_needs(model: Any, artifact: ProjectionArtifact, tokens: Tensor) -> dict[int, Tensor]:
    """Return the needs of the KV heads of each layer on one text: float64 `[H_KV, len(GRID)]`.

    Args:
        model: the model of the artifact.
        artifact: its projections.
        tokens: integers `[T]`.
    """
    from transformers import DynamicCache

    device, method = input_device(model), ranking_defaults(artifact)
    ids = tokens.unsqueeze(0).to(device, torch.int64)
    cache = DynamicCache(config=model.config)
    model.base_model(input_ids=ids[:, :-TOKENS], **with_cache(cache))
    asked: dict[int, Tensor] = {}  # attention with `REFERENCE` of the tokens, by layer
    curves: dict[int, Tensor] = {}
    sparse = -1  # the layer that is sparse in the pass that runs

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]) -> Tensor | None:
        layer = module.layer_idx
        if layer not in artifact.layers:
            return None
        if sparse < 0:
            scaling = arguments.get("scaling") or query.shape[-1] ** -0.5
            ranks = code_ranks(query[0], key[0], artifact.layers[layer], method, scaling)
            curves[layer], asked[layer] = losses(query[0], key[0], value[0], ranks, scaling, output_weight(module))
        return asked[layer].to(query.dtype) if layer == sparse else None

    def logits() -> Tensor:
        # A copy, because a sliding window cannot be cropped.
        found = model(input_ids=ids[:, -TOKENS:], **with_cache(copy.deepcopy(cache)))
        return found.logits[0].float().log_softmax(-1)

    needs = {}
    with observing(model, attend):
        full = logits()
        if missing := sorted(artifact.layers.keys() - curves.keys()):
            raise ModelError(f"layers {missing} of the artifact bypass transformers' attention interface")
        for sparse in artifact.layers:
            own = logits()
            apart = (full.exp() * (full - own)).sum(-1).mean().clamp(min=0).double()
            curve = curves[sparse]
            at = curve[:, GRID.index(REFERENCE)].sum().clamp(min=torch.finfo(torch.float64).tiny)
            needs[sparse] = (curve * (apart / at)).cpu()
    return needs


def code_ranks(query: Tensor, key: Tensor, found: LayerProjection, method: Mapping[str, Any], scaling: float) -> Tensor:
    """Return how the codes of a layer rank the keys for its newest queries: int32 `[H_KV, TOKENS, T]`.

    Args:
        query: `[heads, TOKENS, D]`.
        key: `[H_KV, T, D]`.
        found: the layer's projections.
        method: the defaults of `ranking_defaults`.
        scaling: attention's factor on the products q k.
    """
    codebook = codebook_of(found, slice(None), key.dtype, key.device)
    encoded = encode_with(codebook, key.unsqueeze(0))
    gain = encoded.gain[0].unsqueeze(1) if method["gain"] else None
    grouped = query.unflatten(0, (len(key), -1)).transpose(1, 2)  # [H_KV, TOKENS, G, D]
    rounded = quantize_query(grouped, codebook.projection.unsqueeze(1))
    scores = hash_scores(rounded, encoded.codes[0].unsqueeze(1), gain)
    seen = visible(key.shape[1], key.device)
    ranks = rank(
        scores, rounded.scale, group=method["group"], gain=gain is not None, scaling=scaling, valid=seen.unsqueeze(0)
    )
    return ranks.masked_fill(~seen, torch.iinfo(torch.int32).min)


def losses(
    query: Tensor, key: Tensor, value: Tensor, ranks: Tensor, scaling: float, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what each KV head loses by share, and the attention to `REFERENCE` of the tokens.

    A loss is the squared change of the output behind the output projection, over the squared output of all heads.

    Args:
        query: `[heads, TOKENS, D]`.
        key, value: `[H_KV, T, D]`.
        ranks: int32 `[H_KV, TOKENS, T]`; the largest is the best.
        scaling: attention's factor on the products q k.
        weight: `[hidden, heads * D]`, of the output projection; None: there is none.

    Returns:
        float64 `[H_KV, len(GRID)]`, and `[1, TOKENS, heads, D]` as transformers takes it.
    """
    grouped, value = query.unflatten(0, (len(key), -1)).float(), value.float().unsqueeze(1)
    seen = visible(key.shape[1], key.device)
    weights = (grouped @ key.float().unsqueeze(1).mT * scaling).masked_fill(~seen, float("-inf")).softmax(-1)
    order = ranks.argsort(dim=-1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=key.device).expand_as(order)
    )
    full, count = weights @ value, seen.sum(-1, keepdim=True)

    def attended(share: float, some: slice) -> Tensor:
        kept = weights[:, :, some] * (place[:, some] < (share * count[some]).floor().clamp(min=1)).unsqueeze(1)
        return kept @ value / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)

    if weight is None:
        weight = torch.eye(query.shape[0] * query.shape[2], device=key.device)
    weight = weight.float().unflatten(1, (*grouped.shape[:2], -1))  # [hidden, H_KV, G, D]
    few = slice(EVERY - 1, None, EVERY)

    def passed_on(each: Tensor) -> Tensor:
        return torch.einsum("ehgd,hgtd->hte", weight, each)

    whole = passed_on(full[:, :, few]).sum(0).square().sum(-1)
    curve = [(passed_on(attended(share, few) - full[:, :, few]).square().sum(-1) / whole).mean(-1) for share in GRID]
    return torch.stack(curve, -1).double(), attended(REFERENCE, slice(None)).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def visible(length: int, device: torch.device) -> Tensor:
    """Return which of `length` keys each of the newest queries sees: bool `[TOKENS, length]`."""
    place = torch.arange(length, device=device)
    return place <= place[-TOKENS:].unsqueeze(-1)


def output_weight(module: Any) -> Tensor | None:
    """Return the weight of an attention module's output projection, its last linear layer; None: it has none."""
    linear = [child for child in module.children() if isinstance(child, torch.nn.Linear)]
    return linear[-1].weight if linear else None
