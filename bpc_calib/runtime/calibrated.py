"""The projections of an artifact as tensors for keys of one dtype and device."""

import torch

from bpc_artifacts import LayerProjection
from bpc_calib.method.encoding import AnyEncoder, make_encoder
from bpc_calib.method.product import Product, Projection

__all__ = ["take"]


def take(
    layer: LayerProjection, heads: slice, dtype: torch.dtype, device: torch.device
) -> tuple[Projection, AnyEncoder]:
    """Return what projects queries and what hashes keys, for some KV heads of a layer.

    Args:
        layer: of an artifact.
        heads: which KV heads.
        dtype: of the keys and queries.
        device: where they are.
    """
    rows, metric, mean, centroids = (
        None if array is None else torch.from_numpy(array[heads].copy()).to(device)
        for array in (layer.projection, layer.metric, layer.mean, layer.centroids)
    )
    assert rows is not None
    projection: Projection = rows if centroids is None else Product(rows, centroids)
    return projection.to(dtype), make_encoder(projection, dtype, metric=metric, mean=mean)
