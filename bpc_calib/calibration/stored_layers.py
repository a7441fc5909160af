"""The finished layers in a work folder: one file per layer with its projections and residuals."""

from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.calibration.durable import wait_for
from bpc_calib.calibration.layer_fit import LayerFit
from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.stored_tensors import DamagedError, keep_intact, read_tensors, write_tensors
from bpc_calib.errors import WorkError

__all__ = ["intact_layers", "read_layers", "wait_for_layers", "write_layer"]

HELD_OUT = "held_out"


def write_layer(folder: Path, layer: int, found: LayerFit) -> None:
    """Write one finished layer. Raises `WorkError`."""
    arrays = {field.name: getattr(found.layer, field.name) for field in fields(found.layer)}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
    if found.held_out is not None:
        tensors[HELD_OUT] = found.held_out
    write_tensors(_file(folder, layer), tensors)


def intact_layers(folder: Path, plan: Plan) -> set[int]:
    """Return the finished layers; remove damaged files, with one warning."""

    def intact(path: Path) -> bool:
        try:
            _read(path)
        except DamagedError:
            return False
        return True

    return keep_intact({layer: _file(folder, layer) for layer in plan.model.full_layers}, intact)


def read_layers(folder: Path, plan: Plan) -> dict[int, LayerFit]:
    """Read every layer. Raises `WorkError` if one is missing or damaged."""
    found = {}
    for layer in plan.model.full_layers:
        path = _file(folder, layer)
        try:
            found[layer] = _read(path)
        except DamagedError:
            raise WorkError(
                f"{path}: damaged since it was written: run the same command, which makes it again"
            ) from None
    return found


def wait_for_layers(folder: Path, plan: Plan) -> None:
    """Wait until the files of all layers, which other machines may have written, are seen. Raises `WorkError`."""
    wait_for([_file(folder, layer) for layer in plan.model.full_layers])


def _read(path: Path) -> LayerFit:
    tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in read_tensors(path).items()}
    held_out = tensors.pop(HELD_OUT, None)
    try:
        return LayerFit(LayerProjection(**{name: tensor.numpy() for name, tensor in tensors.items()}), held_out)
    except TypeError as fault:  # other names
        raise DamagedError(path) from fault


def _file(folder: Path, layer: int) -> Path:
    return folder / "layers" / f"{layer:06}.safetensors"
