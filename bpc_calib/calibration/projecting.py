"""Fit every layer from the keys in a work folder, one layer in memory at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from bpc_calib.calibration.layer_fit import LayerFit, fit_layer
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
    progress("decompose", len(fits), len(plan.model.full_layers))
    for layer in plan.model.full_layers:
        if layer in fits:
            continue
        try:
            with memory_advice(
                f"{plan.model.id}: layer {layer}: out of memory while its keys are fitted: make room, and the same "
                f"command goes on after {len(fits)} finished layers; or begin anew with a lower --keys-per-head"
            ):
                keys = read_layer(work.path, layer, plan.fitted)
                aside = read_layer(work.path, layer, plan.held_out) if plan.held_out else None
                fits[layer] = fit_layer(keys, aside, moments.get(layer), plan, device)
        except InputError as fault:
            raise ModelError(f"{plan.model.id}: layer {layer}: {fault}; try another dtype") from fault
        write_layer(work.path, layer, fits[layer])
        progress("decompose", len(fits), len(plan.model.full_layers))
    return {layer: fits[layer] for layer in plan.model.full_layers}
