"""Tensors in safetensors files with checksums: a changed byte is noticed, and one tensor is read without the others."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from bpc_calib.calibration.durable import write_file

__all__ = ["DamagedError", "is_intact", "keep_intact", "read_tensors", "write_tensors"]

log = logging.getLogger(__name__)


class DamagedError(Exception):
    """A file is missing, or is not what was written."""


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


def is_intact(path: Path, names: set[str]) -> bool:
    """Return True if the file has exactly these tensors, unchanged."""
    try:
        return set(read_tensors(path)) == names
    except DamagedError:
        return False


def keep_intact(files: dict[int, Path], intact: Callable[[Path], bool]) -> set[int]:
    """Return the numbers of the files that exist and are intact; remove the damaged ones, with one warning."""
    present = {number: path for number, path in files.items() if path.exists()}
    damaged = [path for path in present.values() if not intact(path)]
    for path in damaged:
        path.unlink()
    if damaged:
        log.warning("%s: %d damaged and made again; the first: %s", damaged[0].parent, len(damaged), damaged[0].name)
    return {number for number, path in present.items() if path not in damaged}


def _digest(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return _sha256(kind + tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else kind)


def _sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()
