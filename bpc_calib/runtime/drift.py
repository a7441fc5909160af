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


def residual(codebook: Codebook, keys: Tensor) -> Tensor:
    """Return the share of the length of keys `[..., N, D]` that their codes do not explain: float64 `[...]`.

    It is `|K - mean - U P| / |K - mean|` in the metric, as the artifact's residual of the last step.
    """
    error = find(keys).encode_with(codebook, keys).error
    wide, in_metric = codebook.centre(keys)
    squared_norm = (wide.double() * in_metric.double()).sum((-2, -1))
    tiny = torch.finfo(torch.float64).tiny
    return (error.double().square().sum(-1) / squared_norm.clamp(min=tiny)).sqrt()


def calibrated_residuals(artifact: ProjectionArtifact | None) -> dict[int, list[float]]:
    """Return the residuals of the calibration by layer and KV head: of samples kept aside, else of the fitted keys."""
    if artifact is None:
        return {}
    if (held_out := artifact.metadata.get("metrics", {}).get("held_out")) is not None:
        return {layer: held_out["residual_by_head"][str(layer)] for layer in artifact.layers}
    return {index: layer.residual[:, -1].tolist() for index, layer in artifact.layers.items()}


def newest_residuals(layers: Sequence[BPCLayer], calibrated: Mapping[int, Sequence[float]]) -> Residuals:
    """Return `BPCCache.residuals` of these layers."""
    found = {}
    for layer in layers:
        if layer.codebook is None or not layer.hashed or layer.index not in calibrated:
            continue
        keys = layer.keys[:, :, max(0, layer.hashed - NEWEST) : layer.hashed : MEASURED].to(layer.device).contiguous()
        seen = calibrated[layer.index]
        own = seen[layer.heads(len(seen), keys.shape[1])]
        found[layer.index] = residual(layer.codebook, keys).mean().item(), sum(own) / len(own)
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
