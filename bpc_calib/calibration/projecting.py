"""Fit every layer from the keys in a work folder, a few layers in memory at a time."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.backends.dispatch import find
from bpc_calib.calibration.memory import memory_advice
from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.positions import early_keys
from bpc_calib.calibration.ranks import layers_of
from bpc_calib.calibration.stored import LayerFit, read_keys, total_moments, write_layer
from bpc_calib.calibration.work_folder import WorkFolder
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.fitting import Fit, mean_key, residual_norms
from bpc_calib.method.metric import score_metric
from bpc_calib.method.nibble_fitting import fit_nibbles, nibble_residuals

__all__ = ["fit_layers", "layers_at_once", "project"]

FITTED_AT_ONCE = 1 << 28  # bytes of float64 keys; plain torch needs up to four copies of them
READ_AT_ONCE = 1 << 29  # bytes of keys


def project(work: WorkFolder, progress: Callable[[str, int, int], None]) -> None:
    """Fit this rank's share of the layers that the work folder lacks, and write them; return when every rank is done.

    Raises:
        ModelError: the keys of a layer cannot be fitted.
        WorkError: the work folder is damaged or cannot be written.
    """
    plan, ranks = work.plan, work.ranks
    device = torch.device("cpu") if work.device.type == "mps" else work.device  # MPS has no float64
    mine = layers_of(plan, work.layers, ranks.rank, ranks.count)
    at_once = layers_at_once(plan, getattr(torch, work.journal.weights["dtype"]).itemsize, device)
    early = early_keys(plan)

    def show(more: int = 0) -> int:
        done = len(work.layers) + ranks.add("layers", more)
        progress("decompose", done, len(plan.model.full_layers))
        return done

    done = show()
    for first in range(0, len(mine), at_once):
        group = mine[first : first + at_once]
        names = f"layer{'s' * (len(group) > 1)} {', '.join(map(str, group))}"
        try:
            with (
                ranks.step("layers"),
                memory_advice(
                    f"{plan.model.id}: {names}: out of memory while the keys are fitted: make room, and the same "
                    f"command goes on after {done} finished layers; or begin anew with a lower --keys-per-head"
                ),
            ):
                found = fit_layers(
                    read_keys(work.path, group, plan.fitted),
                    read_keys(work.path, group, plan.held_out) if plan.held_out else None,
                    total_moments(work.path, plan, group) if plan.summed else None,
                    plan,
                    device,
                    centring=early,
                )
        except InputError as fault:
            raise ModelError(f"{plan.model.id}: {names}: {fault}") from fault
        for layer, fitted in zip(group, found, strict=True):
            write_layer(work.path, layer, fitted)
            done = show(1)
    ranks.barrier("layers", show)


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
    metric = None if moments is None else score_metric(moments.flatten(0, 1))
    heads = max(1, FITTED_AT_ONCE // (keys[0].numel() * 8))
    if device.type == "cpu":
        heads = max(heads, torch.get_num_threads())  # each thread fits a head
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for first in range(0, len(keys), heads):
        part = slice(first, first + heads)
        some = keys[part].to(device)
        mean = None
        if method.centred:
            mean = mean_key(some, None if centring is None else centring.to(device).expand(some.shape[:-1]))
        found = _fit(some, plan, None if metric is None else metric[part].to(device), mean)
        made = {"projection": found.projection, "metric": found.metric, "mean": found.mean}
        made["residual"] = _relative(found.residual_norms).float()
        if held_out is not None:
            other = held_out[part].to(device)
            norms = _residual_norms(other, plan, found)
            made["held_out"] = _relative(norms)[..., -1]
            made["lengths"] = norms[..., 0] / math.sqrt(other.shape[-2])
        for name, tensor in made.items():
            if tensor is not None:
                parts[name].append(tensor.cpu())
    whole = {name: torch.cat(each).unflatten(0, shape) for name, each in parts.items()}
    fits = []
    for i in range(shape[0]):
        tensors = {name: each[i] for name, each in whole.items()}
        measured = [tensors.pop(name, None) for name in ("held_out", "lengths")]
        arrays = {name: each.numpy() for name, each in tensors.items()}
        fits.append(LayerFit(LayerProjection(**arrays, nibbles=method.nibbles), *measured))
    return fits


def _fit(keys: Tensor, plan: Plan, metric: Tensor | None, mean: Tensor | None) -> Fit:
    """Fit keys `[heads, N, head_dim]` as the method does, on the backend of their device."""
    method, backend = plan.method, find(keys.unsqueeze(0))
    common: dict[str, Any] = {
        "iterations": method.iterations, "rounds": method.rounds, "metric": metric, "mean": mean,
    }  # fmt: skip
    if method.nibbles:
        return fit_nibbles(keys, plan.bits, **common, seed=plan.seed, encode=backend.encode_with)
    return backend.fit(keys, plan.bits, **common, generator=torch.Generator().manual_seed(plan.seed))


def _residual_norms(keys: Tensor, plan: Plan, found: Fit) -> Tensor:
    """Measure a fit on other keys `[heads, N, head_dim]`: float64 `[heads, steps + 1]`."""
    if not plan.method.nibbles:
        return residual_norms(keys, found.projection, metric=found.metric, mean=found.mean)
    encode = find(keys.unsqueeze(0)).encode_with
    return nibble_residuals(keys, found.projection, metric=found.metric, mean=found.mean, encode=encode)


def _relative(norms: Tensor) -> Tensor:
    """Divide norms `[..., H + 1]` by the first one; the clamp avoids 0 / 0 for a head whose keys are all zero."""
    return norms / norms[..., :1].clamp(min=torch.finfo(torch.float64).tiny)
