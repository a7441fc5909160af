"""The residuals of an artifact: their name, and their means by layer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["fitted_residuals", "new_text_residuals", "residual_title"]


def residual_title(algorithm: dict[str, Any]) -> str:
    """What residuals are shares of; residuals with different titles cannot be compared."""
    keys = "K - mean" if algorithm["centred"] else "K"
    metric = " in the query metric" if algorithm["metric"] else ""
    return f"Residual |{keys} - UP| / |{keys}|{metric}"


def fitted_residuals(artifact: "ProjectionArtifact") -> dict[int, float]:
    """The residual after all bits on the fitted keys: for each layer the mean over KV heads."""
    return {index: float(layer.residual[:, -1].mean()) for index, layer in artifact.layers.items()}


def new_text_residuals(artifact: "ProjectionArtifact") -> dict[int, float] | None:
    """The same on the held-out samples; None if there was none."""
    held_out = artifact.metadata["metrics"].get("held_out")
    if held_out is None:
        return None
    return {index: float(held_out["residual_by_layer"][str(index)]) for index in artifact.layers}
