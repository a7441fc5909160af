"""Fit several layers: their projections, and the residual on the held-out keys."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.backends.dispatch import fit
from bpc_calib.calibration.plan import Plan
from bpc_calib.method.fitting import Fit, mean_key, residual_norms
from bpc_calib.method.metric import score_metric

__all__ = ["LayerFit", "fit_layers", "layers_at_once"]

FITTED_AT_ONCE = 1 << 28  # bytes of float64 keys; plain torch needs up to four copies of them
READ_AT_ONCE = 1 << 29  # bytes of keys


@dataclass(frozen=True)
class LayerFit:
    """The fit of one layer."""

    layer: LayerProjection
    held_out: Tensor | None  # float64 [kv_heads]: the residual after all bits on the held-out keys


def layers_at_once(plan: Plan, itemsize: int, device: torch.device) -> int:
    """Return how many layers to fit together: on a CPU as many as give every thread as many heads.

    Args:
        itemsize: bytes of a number of a key.
        device: where the layers are fitted.
    """
    if device.type != "cpu":
        return 1
    heads = plan.model.kv_heads
    even = math.lcm(heads, torch.get_num_threads()) // heads
    room = READ_AT_ONCE // (heads * plan.keys_per_head * plan.model.head_dim * itemsize)
    return max(1, min(even, room, len(plan.model.full_layers)))


def fit_layers(
    keys: Tensor,
    held_out: Tensor | None,
    moments: Tensor | None,
    plan: Plan,
    device: torch.device,
    *,
    centring: Tensor | None = None,
) -> list[LayerFit]:
    """Fit the keys of some layers, in groups of heads that fit a fixed amount of memory.

    Args:
        keys: `[layers, kv_heads, N, head_dim]`, the keys to fit.
        held_out: `[layers, kv_heads, M, head_dim]`, the keys to measure the fit on.
        moments: float64 `[layers, kv_heads, head_dim, head_dim]`, for the query metric.
        device: where to compute.
        centring: bool `[N]`, the keys whose mean is subtracted where the method centres; None: all.

    Raises:
        InputError: a key is not finite.
    """
    method, shape = plan.method, keys.shape[:2]
    keys, held_out = keys.flatten(0, 1), None if held_out is None else held_out.flatten(0, 1)
    heads = max(1, FITTED_AT_ONCE // (keys[0].numel() * 8))
    if device.type == "cpu":
        heads = max(heads, torch.get_num_threads())  # each thread fits a head
    metric = None
    if moments is not None and method.metric:
        metric = score_metric(moments.flatten(0, 1))
    fits: list[Fit] = []
    measured: list[Tensor] = []
    for first in range(0, len(keys), heads):
        part = slice(first, first + heads)
        some = keys[part].to(device)
        mean = _mean(some, centring) if method.centred else None
        found = _fit(some, None if metric is None else metric[part].to(device), mean, plan)
        fits.append(found)
        if held_out is not None:
            other = held_out[part].to(device)
            measured.append(residual_norms(other, found.projection, metric=found.metric, mean=found.mean).cpu())

    def by_layer(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.cpu() for part in parts]).unflatten(0, shape)

    projection = by_layer([found.projection for found in fits])
    residual = _relative(by_layer([found.residual_norms for found in fits])).float()
    measure = _relative(by_layer(measured))[..., -1] if measured else None
    mean, metrics = (
        by_layer(parts) if (parts := [part for found in fits if (part := getattr(found, name)) is not None]) else None
        for name in ("mean", "metric")
    )
    return [
        LayerFit(
            LayerProjection(
                projection=projection[i].numpy(),
                residual=residual[i].numpy(),
                metric=None if metrics is None else metrics[i].numpy(),
                mean=None if mean is None else mean[i].numpy(),
            ),
            None if measure is None else measure[i],
        )
        for i in range(shape[0])
    ]


def _mean(keys: Tensor, centring: Tensor | None) -> Tensor:
    """The mean of some keys of each head."""
    return mean_key(keys, None if centring is None else centring.to(keys.device).expand(keys.shape[:-1]))


def _fit(keys: Tensor, metric: Tensor | None, mean: Tensor | None, plan: Plan) -> Fit:
    method, generator = plan.method, torch.Generator().manual_seed(plan.seed)
    return fit(
        keys,
        plan.bits,
        iterations=method.iterations,
        rounds=method.rounds,
        metric=metric,
        mean=mean,
        generator=generator,
    )


def _relative(norms: Tensor) -> Tensor:
    """Divide norms `[..., H + 1]` by the first one; the clamp avoids 0 / 0 for a head whose keys are all zero."""
    return norms / norms[..., :1].clamp(min=torch.finfo(torch.float64).tiny)
