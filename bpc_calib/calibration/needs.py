"""What each KV head needs: its loss by share of the tokens, measured on text, for the shares of a budget.

A layer's sensitivity is the Kullback-Leibler divergence of the next token where that layer alone attends to `REFERENCE`
of the tokens. It is split among the layer's heads, and over the shares of `GRID`, by how much the attention's output
changes behind the output projection: this weighs a head by what the layer passes on.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpc_artifacts import LayerProjection, ProjectionArtifact
from bpc_artifacts.schema import LAST_VERSION
from bpc_calib.backends.dispatch import find
from bpc_calib.compat import with_cache
from bpc_calib.errors import ModelError
from bpc_calib.method.codebook import codebook_of
from bpc_calib.method.rules import ranking_defaults
from bpc_calib.method.scoring import QuantizedQuery, hash_scores, quantize_query
from bpc_calib.method.shares import GRID
from bpc_calib.method.step import rank
from bpc_calib.models.description import ModelDescription
from bpc_calib.models.observation import input_device, observing
from bpc_calib.models.wide_passes import WidePasses

__all__ = ["REFERENCE", "TOKENS", "joined", "measuring_bytes", "text_needs"]

REFERENCE = 0.02
TOKENS = 64  # the newest tokens of a text, at which needs are measured
EVERY = 2  # of these tokens, one in so many gives the curve by share; all give the sensitivity

Needs = dict[int, Tensor]  # by layer, float64 [H_KV, len(GRID)]


def joined(artifact: ProjectionArtifact, lengths: list[int], measured: list[Needs]) -> ProjectionArtifact:
    """Return the artifact with the mean of what was measured on texts of each length, of one or two lengths."""
    kinds = dict(zip(sorted(set(lengths), reverse=True), ("need", "need_short"), strict=False))

    def mean(layer: int, length: int) -> NDArray[np.float32]:
        some = [each[layer] for each, own in zip(measured, lengths, strict=True) if own == length]
        need: NDArray[np.float32] = torch.stack(some).mean(0).float().numpy()
        return need

    layers = dict(artifact.layers)
    for layer in layers:
        needs: dict[str, Any] = {kind: mean(layer, length) for length, kind in kinds.items()}
        layers[layer] = replace(layers[layer], **needs)
    return ProjectionArtifact(layers, {**artifact.metadata, "format_version": LAST_VERSION})


@torch.inference_mode()
def text_needs(
    model: Any, artifact: ProjectionArtifact, tokens: Tensor, tick: Callable[[int], object] = lambda _: None
) -> Needs:
    """Return the needs of the KV heads of each layer on one text.

    It takes a pass over all but the newest `TOKENS` tokens, and for each layer a pass of these through that layer and
    those above it, in float32: in 16 bits, rounding alone moves predictions further than most layers do.

    Args:
        model: the model of the artifact.
        artifact: its projections.
        tokens: integers `[T]`, more than `TOKENS`.
        tick: is called with the steps that were finished, of two per layer: the first pass takes as long as the others.

    Raises:
        ModelError: the artifact has layers that the attention interface did not see.
    """
    from transformers import DynamicCache

    device, method = input_device(model), ranking_defaults(artifact)
    ids = tokens.unsqueeze(0).to(device, torch.int64)
    cache = DynamicCache(config=model.config)
    model.base_model(input_ids=ids[:, :-TOKENS], **with_cache(cache))
    newest = model.get_input_embeddings()(ids[:, -TOKENS:]).float()
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
            curves[layer], asked[layer] = losses(query[0], key[0], value[0], ranks, scaling, output_projection(module))
        return asked[layer].to(query.dtype) if layer == sparse else None

    def likely() -> Tensor:
        # A copy, because a sliding window cannot be cropped.
        found = model(inputs_embeds=newest, **with_cache(copy.deepcopy(cache)))
        return found.logits[0].float().log_softmax(-1)

    needs, blocks = {}, decoder_layers(model)
    with observing(model, attend), WidePasses():
        with recording(blocks) as outputs:
            full = likely()
        if missing := sorted(artifact.layers.keys() - curves.keys()):
            raise ModelError(f"layers {missing} of the artifact bypass transformers' attention interface")
        tick(len(artifact.layers))
        weight = full.exp()
        for sparse in artifact.layers:
            with replaying(blocks[:sparse], outputs):
                apart = torch.einsum("tv,tv->t", weight, full - likely()).mean().clamp(min=0)
            curve = curves[sparse]  # on the CPU: some devices have no float64
            at = curve[:, GRID.index(REFERENCE)].sum().clamp(min=torch.finfo(torch.float64).tiny)
            needs[sparse] = curve * (apart.cpu().double() / at)
            tick(1)
    return needs


def measuring_bytes(model: ModelDescription, hidden: int, length: int, itemsize: int) -> int:
    """Return about the most bytes that `text_needs` takes beside the weights.

    Args:
        model: the description of the model.
        hidden: numbers of a token between layers.
        length: tokens of the text.
        itemsize: bytes of a number of the model's dtype.
    """
    cached = 2 * model.kv_heads * model.head_dim * length * len(model.full_layers) * itemsize
    pairs = model.query_heads * TOKENS * length
    # Several copies of scores and of logits; the widest weight in float32.
    return 2 * cached + 4 * (5 * pairs + (5 * TOKENS + hidden) * model.vocab_size)


def decoder_layers(model: Any) -> list[Any]:
    """Return the modules that are a model's layers, in order; [] if they do not lie in one list."""
    for each in model.modules():
        if isinstance(each, torch.nn.ModuleList) and len(each) and all(map(_has_number, each, range(len(each)))):
            return list(each)
    return []


def _has_number(block: Any, number: int) -> bool:
    return any(getattr(part, "layer_idx", None) == number for part in block.modules())


@contextmanager
def recording(blocks: list[Any]) -> Iterator[list[Any]]:
    """Give a list that holds, after a pass, what each of these modules has returned."""
    outputs: list[Any] = []
    hooks = [block.register_forward_hook(lambda *passed: outputs.append(copy.deepcopy(passed[-1]))) for block in blocks]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replaying(blocks: list[Any], outputs: list[Any]) -> Iterator[None]:
    """Let these modules return what they have returned before, without computing it."""
    before = [vars(block).get("forward") for block in blocks]  # accelerate sets its own
    try:
        for block, output in zip(blocks, outputs, strict=False):
            block.forward = lambda *_, output=output, **__: output
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            del block.forward
            if own is not None:
                block.forward = own


def code_ranks(query: Tensor, key: Tensor, found: LayerProjection, method: Mapping[str, Any], scaling: float) -> Tensor:
    """Return how the codes of a layer rank the keys for its newest queries: int32 `[H_KV, TOKENS, T]`.

    Args:
        query: `[heads, TOKENS, D]`.
        key: `[H_KV, T, D]`.
        found: the layer's projections.
        method: the defaults of `ranking_defaults`.
        scaling: attention's factor on the products q k.
    """
    scores, scale, gain = code_scores(query, key, found, method)
    seen = visible(key.shape[1], key.device)
    ranks = rank(scores, scale, group=method["group"], gain=gain, scaling=scaling, valid=seen.unsqueeze(0))
    return ranks.masked_fill(~seen, torch.iinfo(torch.int32).min)


def code_scores(
    query: Tensor, key: Tensor, found: LayerProjection, method: Mapping[str, Any]
) -> tuple[Tensor, Tensor, bool]:
    """Return scores as of `hash_scores`, `[H_KV, TOKENS, G, T]`, their scale, and whether they include the gain."""
    codebook, keys = codebook_of(found, slice(None), key.dtype, key.device), key.unsqueeze(0)
    encoded = find(keys).encode_with(codebook, keys)
    gain = encoded.gain[0] if method["gain"] else None
    grouped = query.unflatten(0, (len(key), -1)).transpose(1, 2)  # [H_KV, TOKENS, G, D]
    rounded = quantize_query(grouped, codebook.projection.unsqueeze(1), nibbles=codebook.nibbles)
    # All queries of a KV head read the same codes.
    together = QuantizedQuery(rounded.tables.flatten(1, 2), rounded.scale)
    return hash_scores(together, encoded.codes[0], gain).unflatten(1, (TOKENS, -1)), rounded.scale, gain is not None


def losses(
    query: Tensor, key: Tensor, value: Tensor, ranks: Tensor, scaling: float, project: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what each KV head loses by share, and the attention to `REFERENCE` of the tokens.

    A loss is the squared change of the output behind the output projection, over the squared output of all heads.

    Args:
        query: `[heads, TOKENS, D]`.
        key, value: `[H_KV, T, D]`.
        ranks: int32 `[H_KV, TOKENS, T]`; the largest is the best, of equal ones the first.
        scaling: attention's factor on the products q k.
        project: see `output_projection`.

    Returns:
        float64 `[H_KV, len(GRID)]`, and `[1, TOKENS, heads, D]` as transformers takes it.
    """
    grouped, wide = query.unflatten(0, (len(key), -1)).float(), value.float().unsqueeze(1)
    length = key.shape[1]
    seen = visible(length, key.device)
    weights = (grouped @ key.float().unsqueeze(1).mT * scaling).masked_fill(~seen, float("-inf")).softmax(-1)
    order = ranks.to(torch.int64) * length - torch.arange(length, device=key.device)  # no two are equal
    full, count = weights @ wide, seen.sum(-1)

    def attended(share: float, best: Tensor, some: slice) -> Tensor:
        last = (share * count[some]).floor().clamp(min=1).long() - 1
        least = best.gather(-1, last.expand(len(best), -1).unsqueeze(-1))
        kept = weights[:, :, some] * (order[:, some] >= least).unsqueeze(1)
        return kept @ wide / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)

    few = slice(EVERY - 1, None, EVERY)
    best = order[:, few].sort(-1, descending=True).values
    whole = project(full[:, :, few].to(value.dtype)).float().sum(0).square().sum(-1)
    whole = whole.clamp(min=torch.finfo(torch.float32).tiny)  # a layer that adds nothing needs nothing
    curve = []
    for share in GRID:
        change = project((attended(share, best, few) - full[:, :, few]).to(value.dtype)).float()
        curve.append((change.square().sum(-1) / whole).mean(-1))
    chosen = attended(REFERENCE, order.topk(max(1, int(REFERENCE * length)), -1).values, slice(None))
    return torch.stack(curve, -1).cpu().double(), chosen.flatten(0, 1).transpose(0, 1).unsqueeze(0)


def visible(length: int, device: torch.device) -> Tensor:
    """Return which of `length` keys each of the newest queries sees: bool `[TOKENS, length]`."""
    place = torch.arange(length, device=device)
    return place <= place[-TOKENS:].unsqueeze(-1)


def output_projection(module: Any) -> Callable[[Tensor], Tensor]:
    """Return the function from what heads attend to, `[H_KV, G, T, D]`, to what each KV head adds: `[H_KV, T, hidden]`.

    It calls the module's output projection, its last linear layer, for each KV head apart: the weights may be
    quantized, or elsewhere until they are used.
    """
    linear = [child for child in module.children() if hasattr(child, "in_features")]

    def project(each: Tensor) -> Tensor:
        kv_heads = len(each)
        apart = each.new_zeros(kv_heads, each.shape[2], kv_heads, each.shape[1], each.shape[3])
        own = torch.arange(kv_heads, device=each.device)
        apart[own, :, own] = each.transpose(1, 2)
        joined = apart.flatten(2)
        if not linear:
            return joined
        bias = getattr(linear[-1], "bias", None)
        return linear[-1](joined) if bias is None else linear[-1](joined) - bias

    return project
