"""Drift: whether codes describe the newest keys as well as they described those of the calibration."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.backends.dispatch import find
from bpc_calib.method.codebook import Codebook
from bpc_calib.runtime.hashed_layer import BPCLayer

__all__ = ["ADVICE", "NEWEST", "calibrated_residuals", "hardly_fit", "mean", "newest_residuals", "residual"]

NEWEST = 256  # tokens whose keys are measured, and after as many new ones again
MEASURED = 4  # one in so many of these: some thousand keys of all layers and heads
# There the KL to full attention is about twice that of projections that fit; on trained models text of any kind stays
# below (benchmarks/results/drift.json).
BEYOND = 1.25
ADVICE = (  # one text for all caches: the command line shows it once
    f"the projections hardly fit these keys: the residual is above {BEYOND} times the calibration's: calibrate these "
    "weights on such text (bpc calibrate --corpus), or use online projections (-a online; artifact=None in Python)"
)

Residuals = dict[int, tuple[float, float]]
# By layer, for each KV head: residuals, and lengths as of `residual`, which files of before they were kept lack.
Calibrated = Mapping[int, tuple[list[float], list[float] | None]]


def residual(codebook: Codebook, keys: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the share of the length of keys `[..., N, D]` that their codes do not explain: float64 `[...]`.

    It is `|K - mean - U P| / |K - mean|` in the metric, as the artifact's residual of the last step.

    Args:
        codebook: that hashes the keys.
        keys: `[..., N, D]`.
        lengths: float64, broadcast to `[...]`: the least root mean square of `|K - mean|` to compare with.
    """
    error = find(keys).encode_with(codebook, keys).error
    wide, in_metric = codebook.centre(keys)
    squared_norm = (wide.double() * in_metric.double()).sum((-2, -1)).clamp(min=torch.finfo(torch.float64).tiny)
    if lengths is not None:
        squared_norm = squared_norm.maximum(keys.shape[-2] * lengths.square())
    return (error.double().square().sum(-1) / squared_norm).sqrt()


def calibrated_residuals(artifact: ProjectionArtifact | None) -> Calibrated:
    """Return the residuals of the calibration by layer and KV head: of samples kept aside, else of the fitted keys."""
    if artifact is None:
        return {}
    if (held_out := artifact.metadata.get("metrics", {}).get("held_out")) is None:
        return {index: (layer.residual[:, -1].tolist(), None) for index, layer in artifact.layers.items()}
    residuals, lengths = held_out["residual_by_head"], held_out.get("length_by_head", {})
    return {layer: (residuals[str(layer)], lengths.get(str(layer))) for layer in artifact.layers}


def newest_residuals(layers: Sequence[BPCLayer], calibrated: Calibrated) -> Residuals:
    """Return `BPCCache.residuals` of these layers."""
    found = {}
    for layer in layers:
        if layer.codebook is None or not layer.hashed or layer.index not in calibrated:
            continue
        keys = layer.keys[:, :, max(0, layer.hashed - NEWEST) : layer.hashed : MEASURED].to(layer.device).contiguous()
        seen, lengths = calibrated[layer.index]
        heads = layer.heads(len(seen), keys.shape[1])
        own = seen[heads]
        # Keys at early positions are shorter, but their errors are not smaller.
        given = None if lengths is None else torch.tensor(lengths[heads], dtype=torch.float64, device=layer.device)
        found[layer.index] = residual(layer.codebook, keys, given).mean().item(), sum(own) / len(own)
    return found


def mean(residuals: Residuals) -> tuple[float, float] | None:
    """Return the means over the layers: of the newest keys, and of the calibration; None without layers."""
    if not residuals:
        return None
    newest, calibrated = zip(*residuals.values(), strict=True)
    return sum(newest) / len(newest), sum(calibrated) / len(calibrated)


def hardly_fit(residuals: Residuals) -> bool:
    """Return whether codes describe the newest keys far worse than calibration saw."""
    newest, calibrated = mean(residuals) or (0.0, 0.0)
    return bool(calibrated) and newest > BEYOND * calibrated
