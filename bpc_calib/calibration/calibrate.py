"""Calibration: from text to keys, to their decomposition, to the artifact."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bpc_artifacts import LayerProjection, ProjectionArtifact
from bpc_calib.calibration.keys import collect_keys, shift_offsets, spread_positions
from bpc_calib.calibration.plan import Plan, make_plan
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.fitting import fit
from bpc_calib.method.metric import query_metric
from bpc_calib.models.description import describe
from bpc_calib.models.observation import verify
from bpc_calib.text.corpus_list import check_corpora, open_corpora
from bpc_calib.text.known_corpora import DEFAULT_CORPORA, Corpus
from bpc_calib.text.samples import draw_samples

__all__ = ["Collected", "calibrate", "collect", "project"]

Progress = Callable[[str, int, int], None]

FITTED_AT_ONCE = 1 << 28  # bytes of float64 keys; a fit needs up to four copies of them


def calibrate(
    model: Any,
    tokenizer: Any,
    corpora: Sequence[str | os.PathLike[str] | Corpus] = DEFAULT_CORPORA,
    plan: Plan | None = None,
    *,
    progress: Progress = lambda stage, done, total: None,
) -> ProjectionArtifact:
    """Find the projections of a causal language model from text (the paper's OPC).

    The same plan, model, text and software produce the same artifact, byte for byte.

    Args:
        model: a transformers causal language model, on the device for the computation.
        tokenizer: the model's tokenizer.
        corpora: names of `HUB_CORPORA`, `demo`, paths, `NAME=PATH`, or results of `open_corpus`; each corpus gets an
            equal share of the samples.
        plan: the settings (`make_plan`); None is the default plan for this model.
        progress: is called with a stage ("text", "keys", "decompose"), the number of finished steps and their total.

    Raises:
        ModelError: the model is not supported, or a key is not finite.
        CorpusError: a text cannot be read, or a corpus is too short.
        InputError: the plan is for another model, there is no corpus, a text is given twice, or there are fewer samples
            than corpora.
    """
    description = describe(model.config)
    plan = plan or make_plan(description)
    if plan.model.config_sha256 != description.config_sha256:
        raise InputError(f"the plan is for {plan.model.id}, but the model is {description.id}: make a plan for it")
    opened = open_corpora(corpora)
    check_corpora(opened, plan.samples)
    return project(collect(model, tokenizer, plan, opened, progress), plan, model.device, progress)


@dataclass(frozen=True)
class Collected:
    """The results of one pass over the text: see `collect_keys`."""

    keys: dict[int, Tensor]
    moments: dict[int, Tensor]
    sources: list[dict[str, Any]]
    dtype: torch.dtype


def collect(model: Any, tokenizer: Any, plan: Plan, corpora: Sequence[Corpus], progress: Progress) -> Collected:
    """Draw samples from the text and collect their keys from the model."""
    verify(model, plan.model)
    tokens, sources = draw_samples(
        list(corpora),
        tokenizer,
        samples=plan.samples,
        sequence_length=plan.sequence_length,
        seed=plan.seed,
        vocab_size=plan.model.vocab_size,
        progress=lambda done: progress("text", done, plan.samples),
    )
    shape = (plan.samples, plan.sequence_length)
    offsets = [0] * plan.samples
    if plan.position_shift:
        limit = plan.model.context_limit or plan.sequence_length
        offsets = shift_offsets(*shape, limit, random.Random(f"{plan.seed}/position-shift"))
    keys, moments = collect_keys(
        model,
        plan.model,
        tokens,
        positions=spread_positions(*shape, plan.keys_per_head, random.Random(f"{plan.seed}/positions")),
        offsets=offsets,
        moments=plan.method.power is not None,
        progress=lambda done: progress("keys", done, plan.samples),
    )
    return Collected(keys, moments, sources, model.dtype)


def project(collected: Collected, plan: Plan, device: torch.device, progress: Progress) -> ProjectionArtifact:
    """Fit every layer and free its keys."""
    layers = {}
    for done, layer in enumerate(list(collected.keys), start=1):
        keys, moment = collected.keys.pop(layer), collected.moments.get(layer)
        try:
            layers[layer] = _project(keys, moment, plan, _decomposition_device(device))
        except InputError as fault:
            raise ModelError(f"{plan.model.id}: layer {layer}: {fault}; try another dtype") from fault
        progress("decompose", done, len(plan.model.full_layers))
    return ProjectionArtifact(layers, _metadata(plan, collected, layers))


def _project(keys: Tensor, moment: Tensor | None, plan: Plan, device: torch.device) -> LayerProjection:
    """Fit the keys `[kv_heads, N, D]` of one layer, in groups of heads that fit a fixed amount of memory."""
    method = plan.method
    heads = max(1, FITTED_AT_ONCE // (keys[0].numel() * 8))
    metric = None if moment is None or method.power is None else query_metric(moment, method.power)
    fits = []
    for first in range(0, len(keys), heads):
        part = slice(first, first + heads)
        fits.append(
            fit(
                keys[part].to(device),
                plan.bits,
                iterations=method.iterations,
                rounds=method.rounds,
                metric=None if metric is None else metric[part].to(device),
                centred=method.centred,
                generator=torch.Generator().manual_seed(plan.seed),
            )
        )
    means = [fitted.mean.cpu() for fitted in fits if fitted.mean is not None]
    norms = torch.cat([fitted.residual_norms.cpu() for fitted in fits])
    # The clamp avoids 0 / 0 for a head whose keys are all zero.
    residual = norms / norms[:, :1].clamp(min=torch.finfo(torch.float64).tiny)
    return LayerProjection(
        projection=torch.cat([fitted.projection.cpu() for fitted in fits]).numpy(),
        residual=residual.float().numpy(),
        metric=None if metric is None else metric.numpy(),
        mean=torch.cat(means).numpy() if means else None,
    )


def _decomposition_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device  # MPS has no float64


def _metadata(plan: Plan, collected: Collected, layers: dict[int, LayerProjection]) -> dict[str, Any]:
    method = plan.method
    final = {str(index): float(layer.residual[:, -1].mean(dtype=np.float64)) for index, layer in layers.items()}
    return {
        "format_version": 1,
        "bpc_version": version("bpc-calib"),
        "key_space": "post_rope",
        "layers": list(layers),
        "algorithm": {
            "name": method.name,
            "bits": plan.bits,
            "iterations": method.iterations,
            "metric": method.power is not None,
            "least_squares": method.rounds,
            "centred": method.centred,
            "position_shift": plan.position_shift,
            "seed": plan.seed,
        },
        "model": plan.model.metadata(),
        "calibration": {
            "sources": collected.sources,
            "samples": plan.samples,
            "sequence_length": plan.sequence_length,
            "tokens": plan.tokens,
            "keys_per_head": plan.keys_per_head,
            "dtype": str(collected.dtype).removeprefix("torch."),
        },
        "metrics": {"residual": sum(final.values()) / len(final), "residual_by_layer": final},
    }
