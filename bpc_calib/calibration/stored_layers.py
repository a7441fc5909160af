"""The finished layers in a work folder: one file per layer with its projections and residuals."""

from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.calibration.layer_fit import LayerFit
from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.stored_tensors import DamagedError, keep_intact, read_tensors, write_tensors

__all__ = ["intact_layers", "write_layer"]

HELD_OUT = "held_out"


def write_layer(folder: Path, layer: int, found: LayerFit) -> None:
    """Write one finished layer. Raises `WorkError`."""
    arrays = {field.name: getattr(found.layer, field.name) for field in fields(found.layer)}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
    if found.held_out is not None:
        tensors[HELD_OUT] = found.held_out
    write_tensors(_file(folder, layer), tensors)


def intact_layers(folder: Path, plan: Plan) -> dict[int, LayerFit]:
    """Return the finished layers; remove damaged files, with one warning."""
    found: dict[int, LayerFit] = {}

    def read(path: Path) -> bool:
        try:
            found[int(path.stem)] = _layer(read_tensors(path))
        except (DamagedError, TypeError):
            return False
        return True

    keep_intact({layer: _file(folder, layer) for layer in plan.model.full_layers}, read)
    return found


def _layer(tensors: dict[str, Tensor]) -> LayerFit:
    held_out = tensors.pop(HELD_OUT, None)
    arrays = {name: tensor.clone().numpy() for name, tensor in tensors.items()}
    return LayerFit(LayerProjection(**arrays), None if held_out is None else held_out.clone())


def _file(folder: Path, layer: int) -> Path:
    return folder / "layers" / f"{layer:06}.safetensors"
