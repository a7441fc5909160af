"""The projections of a layer, for the KV heads of one rank of tensor parallelism."""

import functools
import logging
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact, check_model, load
from bpc_calib.errors import InputError
from bpc_calib.method.encoding import Encoder
from bpc_calib.models.description import describe
from bpc_calib.runtime.calibrated import take

__all__ = ["LayerProjections", "checked_artifact", "layer_projections", "open_artifact"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerProjections:
    """What hashes the keys and projects the queries of a layer."""

    projection: Tensor  # [kv_heads, bits, head_dim], in the dtype of the keys
    encoder: Encoder

    @torch.inference_mode()
    def refill(self, other: "LayerProjections") -> None:
        """Copy the numbers of others of the same shapes."""
        for old, new in zip(self._tensors(), other._tensors(), strict=True):
            old.copy_(new)

    def _tensors(self) -> list[Tensor]:
        held = [getattr(self.encoder, field.name) for field in fields(self.encoder)]
        return [self.projection, *(tensor for tensor in held if tensor is not None)]


@functools.cache
def open_artifact(path: str) -> ProjectionArtifact:
    """Load an artifact, once per process.

    Raises:
        ArtifactError: the file is no artifact.
    """
    return load(path)


def checked_artifact(path: str, config: Any) -> ProjectionArtifact:
    """Load an artifact and check that it fits the model of a transformers config.

    Raises:
        ArtifactError: the file is no artifact, or belongs to another model.
        ModelError: BPC cannot serve the model.
    """
    artifact = open_artifact(path)
    for warning in check_model(artifact, describe(config).metadata()):
        _warn_once(warning)
    return artifact


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)  # vLLM asks for every layer


def layer_projections(
    artifact: ProjectionArtifact, index: int, heads: slice, dtype: torch.dtype, device: torch.device
) -> LayerProjections | None:
    """Return the projections of some KV heads of a layer, for keys of a dtype; None: the artifact has none.

    Raises:
        InputError: the layer has fewer KV heads than asked for.
    """
    if index not in artifact.layers:
        return None
    layer = artifact.layers[index]
    if heads.stop > len(layer.projection):
        raise InputError(f"layer {index} of the artifact has {len(layer.projection)} KV heads, not {heads.stop}")
    return LayerProjections(*take(layer, heads, dtype, device))
