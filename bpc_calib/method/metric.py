"""The query metric: which directions of a key matter to the queries that score it."""

import torch
from torch import Tensor

from bpc_calib.errors import InputError

__all__ = ["query_metric", "second_moment"]

FLOOR = 1e-4  # of the mean eigenvalue: directions that no query takes still count a little


def second_moment(queries: Tensor) -> Tensor:
    """Sum of `q^T q` over queries `[..., N, D]`: float64 `[..., D, D]`."""
    wide = queries.to(torch.float64)
    return wide.mT @ wide


def query_metric(moment: Tensor, power: float) -> Tensor:
    """`M`, with which `<a, b> = a M b^T` takes the place of the dot product of keys: float32 `[..., D, D]`.

    With `M = E[q^T q]` the squared length `e M e^T` of an error `e` of a key is the expected squared error of
    its score. Averaged over all queries it forgets the rare ones that look something up, so a power below one
    tempers it; 0 is the identity. Symmetric, positive definite, of mean eigenvalue 1.

    Args:
        moment: `[..., D, D]`, `second_moment` of the queries that share a KV head, of any scale.
        power: of the eigenvalues, in [0, 1].

    Raises:
        InputError: moments that are not finite, or a power out of range.
    """
    if not 0 <= power <= 1:
        raise InputError(f"the power of a metric must be in [0, 1], not {power}")
    if moment.dim() < 2 or moment.shape[-1] != moment.shape[-2] or not moment.isfinite().all():
        raise InputError(f"queries must give finite moments [..., D, D], not {list(moment.shape)}")
    values, vectors = torch.linalg.eigh(moment.to(torch.float64))
    mean = values.mean(-1, keepdim=True)
    values = torch.where(mean > 0, values / mean.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    values = values.clamp(min=FLOOR) ** power
    values = values / values.mean(-1, keepdim=True)
    metric = (vectors * values.unsqueeze(-2)) @ vectors.mT
    return ((metric + metric.mT) / 2).float()
