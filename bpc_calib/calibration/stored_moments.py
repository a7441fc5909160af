"""The sums of the queries' moments in a work folder: one file per group of samples.

The order of a sum decides its last bits. So a group is summed sample by sample, and the total group by group, whoever
ran the samples. The file of a group is its running sum: where it is damaged, the group is run again.
"""

from pathlib import Path

import torch
from torch import Tensor

from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.stored_tensors import DamagedError, keep_intact, read_tensors, write_tensors
from bpc_calib.errors import WorkError

__all__ = ["read_sums", "summed_samples", "total_moments", "write_sums"]

LAST = "last"  # the last sample of a running sum


def write_sums(folder: Path, group: int, sample: int, sums: dict[int, Tensor]) -> None:
    """Write the sums of a group up to a sample, float64 `[kv_heads, dim, dim]` by layer. Raises `WorkError`."""
    tensors = {str(layer): each for layer, each in sums.items()}
    write_tensors(_file(folder, group), {LAST: torch.tensor(sample), **tensors})


def summed_samples(folder: Path, plan: Plan) -> dict[int, int]:
    """Return the last sample in the sums of each group that has some; remove damaged files, with one warning."""
    names = {LAST, *map(str, plan.model.full_layers)}
    last: dict[int, int] = {}

    def read(path: Path) -> bool:
        try:
            tensors = read_tensors(path)
        except DamagedError:
            return False
        last[int(path.stem)] = int(tensors.get(LAST, -1))
        return set(tensors) == names

    intact = keep_intact({group: _file(folder, group) for group in range(len(plan.groups))}, read)
    return {group: last[group] for group in intact}


def read_sums(folder: Path, group: int, sample: int, layers: list[int]) -> dict[int, Tensor]:
    """Read the sums of a group up to this sample, of some layers. Raises `WorkError` if they are damaged."""
    path = _file(folder, group)
    try:
        found = read_tensors(path, [LAST, *map(str, layers)])
        if int(found[LAST]) != sample:
            raise DamagedError(path)
    except DamagedError:
        raise WorkError(f"{path}: damaged since it was written: run the same command, which makes it again") from None
    return {layer: found[str(layer)].clone() for layer in layers}


def total_moments(folder: Path, plan: Plan, layers: list[int]) -> Tensor:
    """Return the sums over all fitted samples, float64 `[layers, kv_heads, head_dim, head_dim]`.

    Raises:
        WorkError: a file is damaged.
    """
    total: list[Tensor] = []
    for group, samples in enumerate(plan.groups):
        summed = [sample for sample in plan.summed if sample in samples]
        if summed:
            found = read_sums(folder, group, summed[-1], layers)
            total = [total[i] + found[layer] if total else found[layer] for i, layer in enumerate(layers)]
    return torch.stack(total)


def _file(folder: Path, group: int) -> Path:
    return folder / "moments" / f"{group:06}.safetensors"
