"""The finished work in a work folder, in safetensors files with checksums: keys, sums of moments, and layers.

A changed byte is noticed, and one tensor is read without the others.

The order of a sum decides its last bits. So a group of samples is summed sample by sample, and the total group by
group, whoever ran the samples. The file of a group is its running sum: where it is damaged, the group is run again.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from bpc_artifacts import ArtifactError, LayerProjection
from bpc_calib.calibration.durable import wait_for, write_file
from bpc_calib.calibration.plan import Plan
from bpc_calib.errors import WorkError

__all__ = [
    "LAYERS", "NEEDS", "SAMPLES", "DamagedError", "LayerFit", "intact_layers", "intact_needs", "intact_samples",
    "read_intact", "read_keys", "read_layers", "read_needs", "read_sums", "read_tensors", "read_whole",
    "summed_samples", "total_moments", "wait_for_files", "write_layer", "write_needs", "write_sample", "write_sums",
    "write_tensors",
]  # fmt: skip

T = TypeVar("T")
log = logging.getLogger(__name__)

# Folders, with a file per sample, group of samples, layer, and sample on which needs are measured.
SAMPLES, MOMENTS, LAYERS, NEEDS = "samples", "moments", "layers", "needs"
LAST = "last"  # the last sample of a running sum
HELD_OUT, LENGTHS = "held_out", "lengths"


class DamagedError(WorkError):
    """A file is missing, or is not what was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: damaged since it was written: run the same command, which makes it again")


@dataclass(frozen=True)
class LayerFit:
    """The fit of one layer."""

    layer: LayerProjection
    held_out: Tensor | None  # float64 [kv_heads]: the residual after all bits on the held-out keys
    lengths: Tensor | None  # float64 [kv_heads]: |K - mean| in the metric, the root mean square of the held-out keys


def write_sample(folder: Path, sample: int, keys: dict[int, Tensor]) -> None:
    """Write the keys `[kv_heads, n, head_dim]` of one sample by layer. Raises `WorkError`."""
    write_tensors(_file(folder, SAMPLES, sample), {str(layer): each for layer, each in keys.items()})


def read_keys(folder: Path, layers: list[int], samples: list[int]) -> Tensor:
    """Read the keys of layers, `[layers, kv_heads, N, head_dim]`, of all these samples in order.

    Raises:
        DamagedError: a file is missing or damaged.
    """
    names = {str(layer): [_file(folder, SAMPLES, sample) for sample in samples] for layer in layers}
    of_layers = (torch.cat([read_tensors(file, [name])[name] for file in files], 1) for name, files in names.items())
    return torch.stack(list(of_layers))


def intact_samples(folder: Path, plan: Plan) -> set[int]:
    """Return the samples with an intact file; remove damaged files, with one warning."""
    names = {str(layer) for layer in plan.model.full_layers}

    def check(path: Path) -> None:
        read_whole(path, names)

    return set(read_intact({sample: _file(folder, SAMPLES, sample) for sample in range(plan.samples)}, check))


def wait_for_files(folder: Path, kind: str, numbers: Iterable[int]) -> None:
    """Wait until the files of these samples or layers, which other machines may have written, are seen.

    Args:
        folder: the work folder.
        kind: `SAMPLES`, `LAYERS` or `NEEDS`.
        numbers: of the samples or layers.

    Raises:
        WorkError: some are not seen.
    """
    wait_for([_file(folder, kind, number) for number in numbers])


def write_sums(folder: Path, group: int, sample: int, sums: dict[int, Tensor]) -> None:
    """Write the sums of a group of samples.

    Args:
        folder: the work folder.
        group: number of the group.
        sample: the last sample that is in the sums.
        sums: float64 `[kv_heads, dim, dim]` by layer.

    Raises:
        WorkError: the file cannot be written.
    """
    tensors = {str(layer): each for layer, each in sums.items()}
    write_tensors(_file(folder, MOMENTS, group), {LAST: torch.tensor(sample), **tensors})


def summed_samples(folder: Path, plan: Plan) -> dict[int, int]:
    """Return the last sample in the sums of each group that has some; remove damaged files, with one warning."""
    names = {LAST, *map(str, plan.model.full_layers)}
    files = {group: _file(folder, MOMENTS, group) for group in range(len(plan.groups))}
    return read_intact(files, lambda path: int(read_whole(path, names)[LAST]))


def read_sums(folder: Path, group: int, sample: int, layers: list[int]) -> dict[int, Tensor]:
    """Read the sums of a group of samples: float64 `[kv_heads, dim, dim]` by layer.

    Args:
        folder: the work folder.
        group: number of the group.
        sample: the last sample that must be in the sums.
        layers: the layers to read.

    Raises:
        DamagedError: the file is damaged, or ends with another sample.
    """
    path = _file(folder, MOMENTS, group)
    found = read_tensors(path, [LAST, *map(str, layers)])
    if int(found[LAST]) != sample:
        raise DamagedError(path)
    return {layer: found[str(layer)].clone() for layer in layers}


def total_moments(folder: Path, plan: Plan, layers: list[int]) -> Tensor:
    """Return the sums over all fitted samples, float64 `[layers, kv_heads, head_dim, head_dim]`.

    Raises:
        DamagedError: a file is damaged.
    """
    total: list[Tensor] = []
    for group, samples in enumerate(plan.groups):
        summed = [sample for sample in plan.summed if sample in samples]
        if summed:
            found = read_sums(folder, group, summed[-1], layers)
            total = [total[i] + found[layer] if total else found[layer] for i, layer in enumerate(layers)]
    return torch.stack(total)


def write_layer(folder: Path, layer: int, found: LayerFit) -> None:
    """Write one finished layer. Raises `WorkError`."""
    tensors = {name: torch.from_numpy(array) for name, array in found.layer.arrays().items()}
    tensors |= {name: each for name, each in ((HELD_OUT, found.held_out), (LENGTHS, found.lengths)) if each is not None}
    write_tensors(_file(folder, LAYERS, layer), tensors)


def intact_layers(folder: Path, plan: Plan) -> set[int]:
    """Return the finished layers; remove damaged files, with one warning."""
    return set(read_intact({layer: _file(folder, LAYERS, layer) for layer in plan.model.full_layers}, _read_fit))


def read_layers(folder: Path, plan: Plan) -> dict[int, LayerFit]:
    """Read every layer. Raises `DamagedError` if one is missing or damaged."""
    return {layer: _read_fit(_file(folder, LAYERS, layer)) for layer in plan.model.full_layers}


def _read_fit(path: Path) -> LayerFit:
    tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in read_tensors(path).items()}
    held_out, lengths = (tensors.pop(name, None) for name in (HELD_OUT, LENGTHS))
    if (held_out is None) != (lengths is None):  # of a version that did not keep the lengths
        raise DamagedError(path)
    try:
        layer = LayerProjection.of({name: tensor.numpy() for name, tensor in tensors.items()})
        return LayerFit(layer, held_out, lengths)
    except (TypeError, ArtifactError) as fault:  # other names
        raise DamagedError(path) from fault


def write_needs(folder: Path, nth: int, needs: dict[int, Tensor]) -> None:
    """Write the `nth` of `Plan.measured`: float64 `[kv_heads, shares]` by layer. Raises `WorkError`."""
    write_tensors(_file(folder, NEEDS, nth), {str(layer): each for layer, each in needs.items()})


def intact_needs(folder: Path, plan: Plan) -> set[int]:
    """Return which of `Plan.measured` there are; remove damaged files, with one warning."""
    return set(read_intact({nth: _file(folder, NEEDS, nth) for nth in range(len(plan.measured))}, read_tensors))


def read_needs(folder: Path, plan: Plan) -> list[dict[int, Tensor]]:
    """Read all of `Plan.measured`. Raises `DamagedError` if some are missing or damaged."""
    files = (read_tensors(_file(folder, NEEDS, nth)) for nth in range(len(plan.measured)))
    return [{int(layer): each for layer, each in file.items()} for file in files]


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write CPU tensors in one step. Raises `WorkError`."""
    # `contiguous` keeps the strides of dimensions of size 1, which views as bytes do not allow.
    whole = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    table = json.dumps({name: _digest(tensor) for name, tensor in whole.items()}, sort_keys=True)
    write_file(path, safetensors.torch.save(whole, {"tensors": table, "sha256": _sha256(table.encode())}))


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read tensors by name, or all, and check them. Raises `DamagedError`."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            strings = file.metadata()
            if _sha256(strings["tensors"].encode()) != strings["sha256"]:
                raise DamagedError(path)
            digests = json.loads(strings["tensors"])
            if sorted(digests) != sorted(file.keys()):
                raise DamagedError(path)
            tensors = {name: file.get_tensor(name) for name in (digests if names is None else names)}
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as fault:
        raise DamagedError(path) from fault
    if any(_digest(tensor) != digests[name] for name, tensor in tensors.items()):
        raise DamagedError(path)
    return tensors


def read_whole(path: Path, names: set[str]) -> dict[str, Tensor]:
    """Read all tensors of a file that has exactly these. Raises `DamagedError`."""
    tensors = read_tensors(path)
    if set(tensors) != names:
        raise DamagedError(path)
    return tensors


def read_intact(files: dict[int, Path], read: Callable[[Path], T]) -> dict[int, T]:
    """Return what `read` returns of each file that exists and is intact; remove the damaged ones, with one warning."""
    found: dict[int, T] = {}
    damaged = []
    for number, path in files.items():
        if path.exists():
            try:
                found[number] = read(path)
            except DamagedError:
                damaged.append(path)
                path.unlink()
    if damaged:
        log.warning("%s: %d damaged and made again; the first: %s", damaged[0].parent, len(damaged), damaged[0].name)
    return found


def _digest(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return _sha256(kind + tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else kind)


def _sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _file(folder: Path, kind: str, number: int) -> Path:
    return folder / kind / f"{number:06}.safetensors"
