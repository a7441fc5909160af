"""The query metric: how much each direction of a key matters to the queries."""

import torch
from torch import Tensor

from bpc_calib.errors import InputError

__all__ = ["query_metric", "second_moment"]

FLOOR = 1e-4  # share of the mean eigenvalue: a direction without queries still counts a little


def second_moment(queries: Tensor) -> Tensor:
    """Return the sum of `q^T q` over queries `[..., N, D]`: float64 `[..., D, D]`."""
    wide = queries.to(torch.float64)
    return wide.mT @ wide


def query_metric(moment: Tensor, power: float) -> Tensor:
    """Return `M`, float32 `[..., D, D]`; `<a, b> = a M b^T` replaces the dot product of keys.

    With `M = E[q^T q]`, the squared length `e M e^T` of the error `e` of a key is the expected squared error of
    its score. This average over all queries neglects the rare queries that look something up, so a power below 1
    tempers it; power 0 is the identity. `M` is symmetric, positive definite, and has a mean eigenvalue of 1.

    Args:
        moment: `[..., D, D]`, `second_moment` of the queries that share a KV head, at any scale.
        power: exponent of the eigenvalues, in [0, 1].

    Raises:
        InputError: the moments are not finite, or the power is out of range.
    """
    if not 0 <= power <= 1:
        raise InputError(f"the power of a metric must be in [0, 1], not {power}")
    if moment.dim() < 2 or moment.shape[-1] != moment.shape[-2] or not moment.isfinite().all():
        raise InputError(f"moments of queries must be finite [..., D, D], not {list(moment.shape)}")
    values, vectors = torch.linalg.eigh(moment.to(torch.float64))
    mean = values.mean(-1, keepdim=True)
    values = torch.where(mean > 0, values / mean.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    values = values.clamp(min=FLOOR) ** power
    values = values / values.mean(-1, keepdim=True)
    metric = (vectors * values.unsqueeze(-2)) @ vectors.mT
    return ((metric + metric.mT) / 2).float()
