"""Fit one layer: its projections, and their residual on the held-out keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.backends.dispatch import fit
from bpc_calib.calibration.plan import Plan
from bpc_calib.method.fitting import Fit, residual_norms
from bpc_calib.method.metric import query_metric

__all__ = ["LayerFit", "fit_layer"]

FITTED_AT_ONCE = 1 << 28  # bytes of float64 keys; a fit needs up to four copies of them


@dataclass(frozen=True)
class LayerFit:
    """The result of `fit_layer`."""

    layer: LayerProjection
    held_out: Tensor | None  # float64 [kv_heads]: the residual after all bits on the held-out keys


def fit_layer(
    keys: Tensor, held_out: Tensor | None, moment: Tensor | None, plan: Plan, device: torch.device
) -> LayerFit:
    """Fit the keys of one layer, in groups of heads that fit a fixed amount of memory.

    Args:
        keys: `[kv_heads, N, head_dim]`, the keys to fit.
        held_out: `[kv_heads, M, head_dim]`, the keys to measure the fit on.
        moment: float64 `[kv_heads, head_dim, head_dim]`, for the query metric.
        device: where to compute.

    Raises:
        InputError: a key is not finite.
    """
    method = plan.method
    heads = max(1, FITTED_AT_ONCE // (keys[0].numel() * 8))
    metric = None if moment is None or method.power is None else query_metric(moment, method.power)
    fits: list[Fit] = []
    measured: list[Tensor] = []
    for first in range(0, len(keys), heads):
        part = slice(first, first + heads)
        found = fit(
            keys[part].to(device),
            plan.bits,
            iterations=method.iterations,
            rounds=method.rounds,
            metric=None if metric is None else metric[part].to(device),
            centred=method.centred,
            generator=torch.Generator().manual_seed(plan.seed),
        )
        fits.append(found)
        if held_out is not None:
            aside = held_out[part].to(device)
            measured.append(residual_norms(aside, found.projection, metric=found.metric, mean=found.mean).cpu())
    means = [found.mean.cpu() for found in fits if found.mean is not None]
    return LayerFit(
        LayerProjection(
            projection=torch.cat([found.projection.cpu() for found in fits]).numpy(),
            residual=_relative(torch.cat([found.residual_norms.cpu() for found in fits])).float().numpy(),
            metric=None if metric is None else metric.numpy(),
            mean=torch.cat(means).numpy() if means else None,
        ),
        _relative(torch.cat(measured))[:, -1] if measured else None,
    )


def _relative(norms: Tensor) -> Tensor:
    """Divide norms `[..., H + 1]` by the first one; the clamp avoids 0 / 0 for a head whose keys are all zero."""
    return norms / norms[..., :1].clamp(min=torch.finfo(torch.float64).tiny)
