"""The query metric: how much each direction of a key matters to the queries."""

import torch
from torch import Tensor

from bpc_calib.errors import InputError

__all__ = ["DOMINANT_POWER", "POWER", "WIDE_POWER", "adapted", "query_metric", "score_metric", "second_moment"]

FLOOR = 1e-4  # share of the mean eigenvalue: a direction without queries still counts a little
# How `score_metric` tempers (docs/projections.md): keys of up to 128 numbers, wider keys, and dominant directions.
POWER, WIDE_POWER, DOMINANT_POWER = 0.25, 0.5, 0.75
WIDE = 128
DOMINANT = 16.0  # times the mean eigenvalue: above it a direction is in nearly every query


def second_moment(queries: Tensor) -> Tensor:
    """Return the sum of `q^T q` over queries `[..., N, D]`: float64 `[..., D, D]`."""
    wide = queries.to(torch.float64)
    return wide.mT @ wide


def query_metric(moment: Tensor, power: float, dominant_power: float | None = None) -> Tensor:
    """Return `M`, float32 `[..., D, D]`; `<a, b> = a M b^T` replaces the dot product of keys.

    With `M = E[q^T q]`, the squared length `e M e^T` of the error `e` of a key is the expected squared error of
    its score. This average over all queries neglects the rare queries that look something up, so a power below 1
    tempers it; power 0 is the identity. Tempering also neglects a direction that nearly every query shares, as the
    mean query of large models does: that part of an eigenvalue which is more than `DOMINANT` times the mean gets the
    dominant power. `M` is symmetric, positive definite, and has a mean eigenvalue of 1.

    Args:
        moment: `[..., D, D]`, `second_moment` of the queries that share a KV head, at any scale.
        power: exponent of the eigenvalues, in [0, 1].
        dominant_power: exponent of the part above `DOMINANT`, in [0, 1]; None: `power`.

    Raises:
        InputError: the moments are not finite, or the power is out of range.
    """
    dominant_power = power if dominant_power is None else dominant_power
    for exponent in (power, dominant_power):
        if not 0 <= exponent <= 1:
            raise InputError(f"the power of a metric must be in [0, 1], not {exponent}")
    if moment.dim() < 2 or moment.shape[-1] != moment.shape[-2]:
        raise InputError(f"moments of queries must be [..., D, D], not {list(moment.shape)}")
    if not moment.isfinite().all():
        raise InputError("moments of queries hold NaN or infinity: the model computes them so; try another dtype")
    values, vectors = torch.linalg.eigh(moment.to(torch.float64))
    mean = values.mean(-1, keepdim=True)
    values = torch.where(mean > 0, values / mean.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    excess = (values / DOMINANT).clamp(min=1) ** dominant_power
    values = values.clamp(min=FLOOR, max=DOMINANT) ** power * excess
    values = values / values.mean(-1, keepdim=True)
    metric = (vectors * values.unsqueeze(-2)) @ vectors.mT
    return ((metric + metric.mT) / 2).float()


def score_metric(moment: Tensor) -> Tensor:
    """Return `query_metric` of moments `[..., D, D]` with the powers that serve codes best."""
    return query_metric(moment, POWER if moment.shape[-1] <= WIDE else WIDE_POWER, DOMINANT_POWER)


def adapted(metric: Tensor, prompt: Tensor) -> Tensor:
    """Return the metric in which a prompt's queries count as much as those of calibration (docs/algorithm.md).

    Args:
        metric: of calibration, float32 `[H_KV, D, D]`.
        prompt: of the prompt, float32 `[..., H_KV, D, D]`; both are of `score_metric`, so of the same scale.
    """
    return (metric + prompt) / 2
