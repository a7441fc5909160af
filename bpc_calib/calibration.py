"""Calibration: text, keys, decomposition, artifact."""

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
from bpc_calib.codes import check_bits
from bpc_calib.corpora import DEFAULT_CORPORA, Corpus, expand, open_corpus
from bpc_calib.errors import InputError, ModelError
from bpc_calib.fitting import fit
from bpc_calib.keys import collect_keys, shift_offsets, spread_positions
from bpc_calib.metric import query_metric
from bpc_calib.models import ModelDescription, describe
from bpc_calib.observation import verify
from bpc_calib.samples import draw_samples

__all__ = ["METHODS", "Collected", "Method", "Plan", "calibrate", "collect", "plan", "project"]

Progress = Callable[[str, int, int], None]

KEYS_PER_HEAD = 65_536
SEQUENCE_LENGTH = 8192
FITTED_AT_ONCE = 1 << 28  # bytes of float64 keys, of which a fit holds up to four copies


@dataclass(frozen=True)
class Method:
    """How projections are found; why so: docs/projections.md."""

    name: str
    iterations: int  # steps a bit
    rounds: int  # of least squares
    power: float | None  # of the query metric; None: no metric
    centred: bool
    shift: bool  # of positions, by default


METHODS = {
    method.name: method
    for method in (
        Method("score-aware", iterations=8, rounds=6, power=0.25, centred=True, shift=True),
        Method("paper", iterations=1, rounds=0, power=None, centred=False, shift=False),
    )
}


@dataclass(frozen=True)
class Plan:
    """What a calibration will do; every number is checked. Sizes are in bytes."""

    model: ModelDescription
    method: Method
    bits: int
    samples: int
    sequence_length: int
    keys_per_head: int
    position_shift: bool
    seed: int

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence_length

    def key_bytes(self, itemsize: int) -> int:
        """Memory of the collected keys on the CPU."""
        model = self.model
        return len(model.full_layers) * model.kv_heads * self.keys_per_head * model.head_dim * itemsize

    @property
    def artifact_bytes(self) -> int:
        """Size of the file, but for its header of some kilobytes."""
        model = self.model
        method, dim = self.method, model.head_dim
        numbers = self.bits * dim + self.bits + 1 + (method.power is not None) * dim * dim + method.centred * dim
        return len(model.full_layers) * model.kv_heads * numbers * 4


def plan(
    model: ModelDescription,
    *,
    samples: int = 180,
    sequence_length: int | None = None,
    bits: int = 64,
    method: str = "score-aware",
    position_shift: bool | None = None,
    keys_per_head: int = KEYS_PER_HEAD,
    seed: int = 0,
) -> Plan:
    """Check the arguments of `calibrate` and fill in the defaults.

    Raises:
        InputError: a number out of range, or samples longer than the model's limit.
    """
    check_bits(bits)
    limit = model.context_limit
    length = sequence_length if sequence_length is not None else min(SEQUENCE_LENGTH, limit or SEQUENCE_LENGTH)
    for name, value in (("samples", samples), ("sequence length", length), ("keys per head", keys_per_head)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    if not 0 <= seed < 1 << 63:
        raise InputError(f"seed must be at least 0 and below 2^63, not {seed}")
    if limit and length > limit:
        raise InputError(f"a sequence length of {length} is over the limit of {model.id}, {limit} tokens")
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}: known are {', '.join(METHODS)}")
    if position_shift and not model.can_shift:
        raise InputError(f"{model.id} does not allow a position shift: no RoPE, or one that depends on the length")
    return Plan(
        model=model,
        method=METHODS[method],
        bits=bits,
        samples=samples,
        sequence_length=length,
        keys_per_head=min(keys_per_head, samples * length),
        position_shift=(METHODS[method].shift and model.can_shift) if position_shift is None else position_shift,
        seed=seed,
    )


def calibrate(
    model: Any,
    tokenizer: Any,
    *,
    corpora: Sequence[str | os.PathLike[str] | Corpus] = DEFAULT_CORPORA,
    samples: int = 180,
    sequence_length: int | None = None,
    bits: int = 64,
    method: str = "score-aware",
    position_shift: bool | None = None,
    keys_per_head: int = KEYS_PER_HEAD,
    seed: int = 0,
    text_field: str = "text",
    revision: str | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> ProjectionArtifact:
    """Find the projections of a causal language model from text (the paper's OPC).

    Args:
        model: a transformers causal language model, on the device that is to do the work.
        tokenizer: its tokenizer.
        corpora: names of `HUB_CORPORA`, `demo`, paths, `NAME=PATH`, or what `open_corpus` gave; each gives an equal
            share of the samples.
        samples: forward passes, one sample each.
        sequence_length: tokens a sample; None is 8,192 or the model's limit if that is lower.
        bits: code length, 32, 64 or 128.
        method: "score-aware" (a metric from the queries, 8 steps a bit, least squares, centring, position shift) or
            "paper" (Algorithm 1 as printed, no shift).
        position_shift: overrides the method's; RoPE models without length-dependent scaling only.
        keys_per_head: keys kept for each KV head.
        seed: the same seed, model, text and software give the same artifact, byte for byte.
        text_field: the field of local JSON and parquet files that holds the text.
        revision: Hub commit of the model, recorded in the artifact.
        progress: called with a stage ("text", "keys", "decompose"), how much is done, and of how much.

    Raises:
        ModelError: a model that cannot be served, or keys that are not finite.
        CorpusError: text that cannot be had, or too little of it.
        InputError: arguments out of range.
    """
    chosen = plan(
        describe(model.config, revision=revision),
        samples=samples,
        sequence_length=sequence_length,
        bits=bits,
        method=method,
        position_shift=position_shift,
        keys_per_head=keys_per_head,
        seed=seed,
    )
    if not corpora or isinstance(corpora, str):
        raise InputError(f"corpora must be a list of at least one corpus, not {corpora!r}")
    opened = [
        spec if isinstance(spec, Corpus) else open_corpus(os.fspath(spec), text_field=text_field)
        for spec in expand(corpora)
    ]
    return project(collect(model, tokenizer, chosen, opened, progress), chosen, model.device, progress)


@dataclass(frozen=True)
class Collected:
    """What a pass over the text gives: see `collect_keys`."""

    keys: dict[int, Tensor]
    moments: dict[int, Tensor]
    sources: list[dict[str, Any]]
    dtype: torch.dtype


def collect(model: Any, tokenizer: Any, chosen: Plan, corpora: Sequence[Corpus], progress: Progress) -> Collected:
    """Read the text and run it through the model."""
    verify(model, chosen.model)
    tokens, sources = draw_samples(
        list(corpora),
        tokenizer,
        samples=chosen.samples,
        sequence_length=chosen.sequence_length,
        seed=chosen.seed,
        vocab_size=chosen.model.vocab_size,
        progress=lambda done: progress("text", done, chosen.samples),
    )
    shape = (chosen.samples, chosen.sequence_length)
    offsets = [0] * chosen.samples
    if chosen.position_shift:
        limit = chosen.model.context_limit or chosen.sequence_length
        offsets = shift_offsets(*shape, limit, random.Random(f"{chosen.seed}/position-shift"))
    keys, moments = collect_keys(
        model,
        chosen.model,
        tokens,
        positions=spread_positions(*shape, chosen.keys_per_head, random.Random(f"{chosen.seed}/positions")),
        offsets=offsets,
        moments=chosen.method.power is not None,
        progress=lambda done: progress("keys", done, chosen.samples),
    )
    return Collected(keys, moments, sources, model.dtype)


def project(collected: Collected, chosen: Plan, device: torch.device, progress: Progress) -> ProjectionArtifact:
    """Fit every layer; its keys are let go."""
    layers = {}
    for done, layer in enumerate(list(collected.keys), start=1):
        keys, moment = collected.keys.pop(layer), collected.moments.get(layer)
        try:
            layers[layer] = _project(keys, moment, chosen, _decomposition_device(device))
        except InputError as fault:
            raise ModelError(f"{chosen.model.id}: layer {layer}: {fault}; try another dtype") from fault
        progress("decompose", done, len(chosen.model.full_layers))
    return ProjectionArtifact(layers, _metadata(chosen, collected, layers))


def _project(keys: Tensor, moment: Tensor | None, chosen: Plan, device: torch.device) -> LayerProjection:
    """Fit `[kv_heads, N, D]`, as many heads at once as fit a fixed memory."""
    method = chosen.method
    heads = max(1, FITTED_AT_ONCE // (keys[0].numel() * 8))
    metric = None if moment is None or method.power is None else query_metric(moment, method.power)
    found = []
    for first in range(0, len(keys), heads):
        part = slice(first, first + heads)
        found.append(
            fit(
                keys[part].to(device),
                chosen.bits,
                iterations=method.iterations,
                rounds=method.rounds,
                metric=None if metric is None else metric[part].to(device),
                centred=method.centred,
                generator=torch.Generator().manual_seed(chosen.seed),
            )
        )
    means = [each.mean.cpu() for each in found if each.mean is not None]
    norms = torch.cat([each.residual_norms.cpu() for each in found])
    # A head whose keys are all zero has nothing left from the start.
    residual = norms / norms[:, :1].clamp(min=torch.finfo(torch.float64).tiny)
    return LayerProjection(
        projection=torch.cat([each.projection.cpu() for each in found]).numpy(),
        residual=residual.float().numpy(),
        metric=None if metric is None else metric.numpy(),
        mean=torch.cat(means).numpy() if means else None,
    )


def _decomposition_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device  # MPS has no float64


def _metadata(chosen: Plan, collected: Collected, layers: dict[int, LayerProjection]) -> dict[str, Any]:
    method = chosen.method
    final = {str(index): float(layer.residual[:, -1].mean(dtype=np.float64)) for index, layer in layers.items()}
    return {
        "format_version": 1,
        "bpc_version": version("bpc-calib"),
        "key_space": "post_rope",
        "layers": list(layers),
        "algorithm": {
            "name": method.name,
            "bits": chosen.bits,
            "iterations": method.iterations,
            "metric": method.power is not None,
            "least_squares": method.rounds,
            "centred": method.centred,
            "position_shift": chosen.position_shift,
            "seed": chosen.seed,
        },
        "model": chosen.model.metadata(),
        "calibration": {
            "sources": collected.sources,
            "samples": chosen.samples,
            "sequence_length": chosen.sequence_length,
            "tokens": chosen.tokens,
            "keys_per_head": chosen.keys_per_head,
            "dtype": str(collected.dtype).removeprefix("torch."),
        },
        "metrics": {"residual": sum(final.values()) / len(final), "residual_by_layer": final},
    }
