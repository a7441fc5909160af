"""Fit every layer from the keys in a work folder, a few layers in memory at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from bpc_calib.calibration.layer_fit import fit_layers, layers_at_once
from bpc_calib.calibration.memory import memory_advice
from bpc_calib.calibration.positions import early_keys
from bpc_calib.calibration.ranks import layers_of
from bpc_calib.calibration.stored_keys import read_layer
from bpc_calib.calibration.stored_layers import write_layer
from bpc_calib.calibration.stored_moments import total_moments
from bpc_calib.calibration.work_folder import WorkFolder
from bpc_calib.errors import InputError, ModelError

__all__ = ["project"]


def project(work: WorkFolder, progress: Callable[[str, int, int], None]) -> None:
    """Fit this rank's share of the layers that the work folder lacks, and write them; return when every rank is done.

    Rank 0 may remove the folder then: the others look into it no more.

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
                    _keys(work, group, plan.fitted),
                    _keys(work, group, plan.held_out) if plan.held_out else None,
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
    ranks.meet("layers", show)


def _keys(work: WorkFolder, layers: list[int], samples: list[int]) -> Tensor:
    """The kept keys of some layers and samples, `[layers, kv_heads, N, head_dim]`."""
    return torch.stack([read_layer(work.path, layer, samples) for layer in layers])
