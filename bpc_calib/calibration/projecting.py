"""Fit every layer from the keys in a work folder, a few layers in memory at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from bpc_calib.calibration.layer_fit import LayerFit, fit_layers, layers_at_once
from bpc_calib.calibration.memory import memory_advice
from bpc_calib.calibration.stored_keys import read_layer
from bpc_calib.calibration.stored_layers import write_layer
from bpc_calib.calibration.work_folder import WorkFolder
from bpc_calib.errors import InputError, ModelError

__all__ = ["project"]


def project(
    work: WorkFolder, moments: dict[int, Tensor], progress: Callable[[str, int, int], None]
) -> dict[int, LayerFit]:
    """Fit every layer that the work folder lacks, and write it; return all layers.

    Raises:
        ModelError: the keys of a layer cannot be fitted.
        WorkError: the work folder is damaged or cannot be written.
    """
    plan = work.plan
    fits = dict(work.layers)
    device = torch.device("cpu") if work.device.type == "mps" else work.device  # MPS has no float64
    left = [layer for layer in plan.model.full_layers if layer not in fits]
    at_once = layers_at_once(plan, getattr(torch, work.journal.weights["dtype"]).itemsize, device)
    progress("decompose", len(fits), len(plan.model.full_layers))
    for first in range(0, len(left), at_once):
        group = left[first : first + at_once]
        names = f"layer{'s' * (len(group) > 1)} {', '.join(map(str, group))}"
        try:
            with memory_advice(
                f"{plan.model.id}: {names}: out of memory while the keys are fitted: make room, and the same "
                f"command goes on after {len(fits)} finished layers; or begin anew with a lower --keys-per-head"
            ):
                found = fit_layers(
                    _keys(work, group, plan.fitted),
                    _keys(work, group, plan.held_out) if plan.held_out else None,
                    torch.stack([moments[layer] for layer in group]) if moments else None,
                    plan,
                    device,
                )
        except InputError as fault:
            raise ModelError(f"{plan.model.id}: {names}: {fault}") from fault
        for layer, fitted in zip(group, found, strict=True):
            fits[layer] = fitted
            write_layer(work.path, layer, fitted)
            progress("decompose", len(fits), len(plan.model.full_layers))
    return {layer: fits[layer] for layer in plan.model.full_layers}


def _keys(work: WorkFolder, layers: list[int], samples: list[int]) -> Tensor:
    """The kept keys of some layers and samples, `[layers, kv_heads, N, head_dim]`."""
    return torch.stack([read_layer(work.path, layer, samples) for layer in layers])
