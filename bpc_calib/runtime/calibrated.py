"""The projections of an artifact as tensors for keys of one dtype and device."""

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.method.encoding import Encoder, make_encoder

__all__ = ["take"]


def take(layer: LayerProjection, heads: slice, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Encoder]:
    """Return what projects queries and what hashes keys, for some KV heads of a layer.

    Args:
        layer: of an artifact.
        heads: which KV heads.
        dtype: of the keys and queries.
        device: where they are.
    """
    projection, metric, mean = (
        None if array is None else torch.from_numpy(array[heads].copy()).to(device)
        for array in (layer.projection, layer.metric, layer.mean)
    )
    assert projection is not None
    return projection.to(dtype), make_encoder(projection, dtype, metric=metric, mean=mean)
