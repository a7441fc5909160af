"""The contents of the artifact: the projections of all layers, and how they were found."""

from importlib.metadata import version
from typing import Any

import numpy as np

from bpc_artifacts import ProjectionArtifact
from bpc_artifacts.schema import format_version
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
    method = plan.method
    final = {str(index): float(found.layer.residual[:, -1].mean(dtype=np.float64)) for index, found in fits.items()}
    metrics: dict[str, Any] = {"residual": sum(final.values()) / len(final), "residual_by_layer": final}
    held_out = {str(layer): found.held_out for layer, found in fits.items() if found.held_out is not None}
    if held_out:
        by_layer = {layer: float(each.mean()) for layer, each in held_out.items()}
        metrics["held_out"] = {
            "samples": len(plan.held_out),
            "keys_per_head": plan.held_out_keys_per_head,
            "residual": sum(by_layer.values()) / len(by_layer),
            "residual_by_layer": by_layer,
            "residual_by_head": {layer: each.tolist() for layer, each in held_out.items()},
            "length_by_head": {
                str(layer): found.lengths.tolist() for layer, found in fits.items() if found.lengths is not None
            },
        }
    layers = {layer: found.layer for layer, found in fits.items()}
    metadata = {
        "format_version": format_version(ProjectionArtifact(layers, {})),
        "bpc_version": version("bpc-calib"),
        "key_space": "post_rope",
        "layers": list(fits),
        "algorithm": {
            "name": method.name,
            "bits": plan.bits,
            **({"codes": "nibbles"} if method.nibbles else {}),
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
    return ProjectionArtifact(layers, metadata)
