"""Calibration: from text to keys, to their decomposition, to the artifact."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.calibration.held_out import held_out_metrics
from bpc_calib.calibration.keys import sample_keys
from bpc_calib.calibration.layer_fit import LayerFit, fit_layer
from bpc_calib.calibration.plan import Plan, make_plan
from bpc_calib.calibration.positions import first_positions, key_positions
from bpc_calib.errors import InputError, ModelError
from bpc_calib.models.description import describe
from bpc_calib.models.observation import verify
from bpc_calib.text.corpus_list import check_corpora, open_corpora
from bpc_calib.text.known_corpora import DEFAULT_CORPORA, Corpus
from bpc_calib.text.samples import draw_samples

__all__ = ["Collected", "calibrate", "collect", "project"]

Progress = Callable[[str, int, int], None]


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
    """The results of one pass over the text, by the index of the full-attention layer."""

    keys: dict[int, Tensor]  # [kv_heads, N, head_dim] of the fitted samples
    held_out: dict[int, Tensor]  # [kv_heads, M, head_dim] of the held-out samples; empty without any
    moments: dict[int, Tensor]  # float64 [kv_heads, head_dim, head_dim] of the fitted samples' queries
    sources: list[dict[str, Any]]


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
    layers, aside = plan.model.full_layers, set(plan.held_out)
    kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    kept_aside: dict[int, list[Tensor]] = {layer: [] for layer in layers if aside}
    moments: dict[int, Tensor] = {}
    for i, (positions, offset) in enumerate(zip(key_positions(plan), first_positions(plan), strict=True)):
        summed = plan.method.power is not None and i not in aside
        found = sample_keys(model, plan.model, tokens[i], positions, offset=offset, moments=summed)
        for layer in layers:
            (kept_aside if i in aside else kept)[layer].append(found.keys[layer])
            if summed:
                moment = found.moments[layer]
                moments[layer] = moments[layer] + moment if layer in moments else moment
        progress("keys", i + 1, plan.samples)
    joined, joined_aside = (
        {layer: torch.cat(each.pop(layer), dim=1) for layer in list(each)} for each in (kept, kept_aside)
    )
    return Collected(joined, joined_aside, moments, sources)


def project(collected: Collected, plan: Plan, device: torch.device, progress: Progress) -> ProjectionArtifact:
    """Fit every layer and free its keys."""
    fits: dict[int, LayerFit] = {}
    dtype = next(iter(collected.keys.values())).dtype
    for done, layer in enumerate(list(collected.keys), start=1):
        keys, aside, moment = collected.keys.pop(layer), collected.held_out.get(layer), collected.moments.get(layer)
        try:
            fits[layer] = fit_layer(keys, aside, moment, plan, _decomposition_device(device))
        except InputError as fault:
            raise ModelError(f"{plan.model.id}: layer {layer}: {fault}; try another dtype") from fault
        progress("decompose", done, len(plan.model.full_layers))
    layers = {layer: found.layer for layer, found in fits.items()}
    return ProjectionArtifact(layers, _metadata(plan, collected.sources, dtype, fits))


def _decomposition_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device  # MPS has no float64


def _metadata(
    plan: Plan, sources: list[dict[str, Any]], dtype: torch.dtype, fits: dict[int, LayerFit]
) -> dict[str, Any]:
    method = plan.method
    final = {str(index): float(found.layer.residual[:, -1].mean(dtype=np.float64)) for index, found in fits.items()}
    metrics: dict[str, Any] = {"residual": sum(final.values()) / len(final), "residual_by_layer": final}
    held_out = {layer: found.held_out for layer, found in fits.items() if found.held_out is not None}
    if held_out:
        keys = sum(len(key_positions(plan)[sample]) for sample in plan.held_out)
        metrics["held_out"] = held_out_metrics(held_out, len(plan.held_out), keys)
    return {
        "format_version": 1,
        "bpc_version": version("bpc-calib"),
        "key_space": "post_rope",
        "layers": list(fits),
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
            "sources": sources,
            "samples": plan.samples,
            "sequence_length": plan.sequence_length,
            "tokens": plan.tokens,
            "keys_per_head": plan.keys_per_head,
            "dtype": str(dtype).removeprefix("torch."),
        },
        "metrics": metrics,
    }
