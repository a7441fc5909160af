"""The memory and disk that a calibration will take, counted without running anything."""

from dataclasses import dataclass
from typing import Any

import torch

from bpc_calib.calibration.keys import chunk_edges, pass_bytes
from bpc_calib.calibration.needs import measuring_bytes
from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.projecting import layers_at_once

__all__ = ["Costs", "costs"]

COPIES = 3  # of the keys of a group of layers: as read, stacked, and as the kernels want them


@dataclass(frozen=True)
class Costs:
    """What a calibration takes beside the weights: bytes are peaks of one device each."""

    pass_bytes: int  # of a sample's forward passes, without the weights, and of measuring needs
    fit_bytes: int  # of the keys that are fitted together
    disk_bytes: int  # of the work folder


def costs(plan: Plan, model: Any, device: torch.device) -> Costs:
    """Count what a calibration takes.

    Args:
        plan: the calibration.
        model: a transformers model without memory for its weights (on the device "meta").
        device: that will run the model.
    """
    itemsize = model.dtype.itemsize
    text, length = model.config.get_text_config(decoder=True), plan.sequence_length
    passes = chunk_edges(model, plan.model, length)
    whole, chunked = pass_bytes(text, plan.model, length, itemsize)
    fitted = plan.model.kv_heads * plan.keys_per_head * plan.model.head_dim * itemsize
    longest = max((each for _, each in plan.measured), default=0)
    measured = measuring_bytes(plan.model, text.hidden_size, longest, itemsize) if longest else 0
    return Costs(
        max(whole if len(passes) == 1 else chunked, measured),
        COPIES * layers_at_once(plan, itemsize, device) * fitted,
        plan.work_bytes(itemsize),
    )
