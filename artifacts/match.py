"""Check that an artifact belongs to a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bpc_artifacts.errors import ArtifactError

if TYPE_CHECKING:
    from bpc_artifacts.schema import ProjectionArtifact

__all__ = ["check_model"]


def check_model(artifact: "ProjectionArtifact", model: Mapping[str, Any]) -> list[str]:
    """Compare an artifact with a model; `model` has the form of the metadata's `model` (see `bpc_calib.describe`).

    Returns:
        Warnings, one line each: every shape fits, but the model may be a different one.

    Raises:
        ArtifactError: the layers, heads, head_dim, RoPE or layer types differ; the message lists each difference.
    """
    made_for = artifact.metadata["model"]
    names = {
        "num_layers": "layers",
        "kv_heads": "KV heads",
        "query_heads": "query heads",
        "head_dim": "head_dim",
        "rope": "RoPE",
        "layer_types": "layer types",
    }
    if made_for["num_layers"] != model["num_layers"]:
        del names["layer_types"]  # a list of one per layer says no more
    differences = [
        f"{name}: the artifact has {_short(made_for[key])}, the model {_short(model[key])}"
        for key, name in names.items()
        if made_for[key] != model[key]
    ]
    if differences:
        raise ArtifactError(
            f"made for {made_for['id']}, does not fit {model['id']}: {'; '.join(differences)} "
            f"(bpc calibrate makes an artifact for {model['id']})"
        )
    return [
        f"{name} differs from that of the calibrated model: "
        f"the artifact has {_short(made_for[key])}, the model {_short(model[key])}"
        for key, name in {
            "revision": "revision",
            "config_sha256": "config",
            "model_type": "model type",
        }.items()
        if made_for[key] != model[key] and None not in (made_for[key], model[key])
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
