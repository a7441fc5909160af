"""The contents of the artifact: the projections of all layers, and how they were found."""

from importlib.metadata import version
from typing import Any

import numpy as np
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_artifacts.schema import FORMAT_VERSION
from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.stored import LayerFit

__all__ = ["contents"]


def contents(plan: Plan, sources: list[dict[str, Any]], dtype: str, fits: dict[int, LayerFit]) -> ProjectionArtifact:
    """Return the artifact of these layers; docs/artifact-format.md describes its metadata.

    Args:
        sources: see `text.samples.source`.
        dtype: the name of the model's dtype.
        fits: every full-attention layer, ascending.
    """
    return ProjectionArtifact(
        {layer: found.layer for layer, found in fits.items()}, _metadata(plan, sources, dtype, fits)
    )


def _metadata(plan: Plan, sources: list[dict[str, Any]], dtype: str, fits: dict[int, LayerFit]) -> dict[str, Any]:
    method = plan.method
    final = {str(index): float(found.layer.residual[:, -1].mean(dtype=np.float64)) for index, found in fits.items()}
    metrics: dict[str, Any] = {"residual": sum(final.values()) / len(final), "residual_by_layer": final}
    held_out = {layer: found.held_out for layer, found in fits.items() if found.held_out is not None}
    if held_out:
        metrics["held_out"] = _held_out(held_out, len(plan.held_out), plan.held_out_keys_per_head)
    return {
        "format_version": FORMAT_VERSION,
        "bpc_version": version("bpc-calib"),
        "key_space": "post_rope",
        "layers": list(fits),
        "algorithm": {
            "name": method.name,
            "bits": plan.bits,
            "iterations": method.iterations,
            "metric": method.metric,
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
            "dtype": dtype,
        },
        "metrics": metrics,
    }


def _held_out(residuals: dict[int, Tensor], samples: int, keys_per_head: int) -> dict[str, Any]:
    """Return the table `metrics.held_out` of the artifact.

    Args:
        residuals: float64 `[kv_heads]` by layer: the residual on the held-out keys after all bits.
        samples: the number of held-out samples.
        keys_per_head: the number of held-out keys per KV head.
    """
    by_layer = {str(layer): float(each.mean()) for layer, each in residuals.items()}
    return {
        "samples": samples,
        "keys_per_head": keys_per_head,
        "residual": sum(by_layer.values()) / len(by_layer),
        "residual_by_layer": by_layer,
        "residual_by_head": {str(layer): each.tolist() for layer, each in residuals.items()},
    }
