"""The kept keys in a work folder: one file per sample, read back one layer at a time."""

from pathlib import Path

import torch
from torch import Tensor

from bpc_calib.calibration.durable import wait_for
from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.stored_tensors import DamagedError, is_intact, keep_intact, read_tensors, write_tensors
from bpc_calib.errors import WorkError

__all__ = ["intact_samples", "read_layer", "wait_for_samples", "write_sample"]


def write_sample(folder: Path, sample: int, keys: dict[int, Tensor]) -> None:
    """Write the keys `[kv_heads, n, head_dim]` of one sample by layer. Raises `WorkError`."""
    write_tensors(_file(folder, sample), {str(layer): each for layer, each in keys.items()})


def read_layer(folder: Path, layer: int, samples: list[int]) -> Tensor:
    """Read the keys of one layer: `[kv_heads, N, head_dim]`, of all these samples in order.

    Raises:
        WorkError: a file is damaged.
    """
    found = []
    for sample in samples:
        try:
            found.append(read_tensors(_file(folder, sample), [str(layer)])[str(layer)])
        except DamagedError:
            raise WorkError(
                f"{_file(folder, sample)}: damaged since it was written: run the same command, which makes it again"
            ) from None
    return torch.cat(found, dim=1)


def intact_samples(folder: Path, plan: Plan) -> set[int]:
    """Return the samples with an intact file; remove damaged files, with one warning."""
    names = {str(layer) for layer in plan.model.full_layers}
    return keep_intact({i: _file(folder, i) for i in range(plan.samples)}, lambda path: is_intact(path, names))


def wait_for_samples(folder: Path, plan: Plan) -> None:
    """Wait until the files of all samples, which other machines may have written, are seen. Raises `WorkError`."""
    wait_for([_file(folder, sample) for sample in range(plan.samples)])


def _file(folder: Path, sample: int) -> Path:
    return folder / "samples" / f"{sample:06}.safetensors"
