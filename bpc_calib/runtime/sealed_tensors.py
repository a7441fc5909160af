"""Large tensors in one safetensors file, each with its hash: written piece by piece, checked whole when read."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bpc_artifacts.errors import ArtifactError, why
from bpc_artifacts.replacing import Kind, replacing, try_replacing
from bpc_artifacts.sealed import SEAL, canonical, header_matches, metadata_sha256, one_line, strict_json
from bpc_calib.errors import CacheFileError

__all__ = ["damaged", "kind_of", "opened", "write"]

HASHES = "sha256"  # the metadata key of the hashes
MOST_HEADER = 1 << 24  # bytes
CODES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


def damaged(what: str) -> CacheFileError:
    """Return the error of a file that is not what was written."""
    return CacheFileError(f"damaged: {what}: remove the file and make the cache again")


def kind_of(key: str, name: str) -> Kind:
    """Return the kind of the files whose metadata are under `key`; `name` is how messages call one."""
    ours = re.compile(f'"{key}":'.encode())
    return Kind(name, lambda path: header_matches(path, ours, MOST_HEADER))


def write(
    path: Path, kind: Kind, key: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], overwrite: bool
) -> int:
    """Write tensors `[sequences, heads, ...]` or smaller to a file, in one step; return its size in bytes.

    No more than one head of one sequence is copied at a time.

    Args:
        path, kind, overwrite: as in `replacing`.
        key: of the metadata in the file.
        metadata: JSON; the hashes of the tensors and of the metadata join them.
        tensors: by name.

    Raises:
        CacheFileError: the file cannot be written; nothing changed.
    """
    # Wide numbers first: all then lie at multiples of their size.
    tensors = dict(sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0])))
    empty = _header(key, metadata, tensors, dict.fromkeys(tensors, "0" * 64))
    size = len(empty) + sum(tensor.nbytes for tensor in tensors.values())
    try:
        try_replacing(path, size, overwrite, kind)
        with replacing(path, overwrite, kind) as temporary, open(temporary, "wb", opener=_private) as file:
            file.write(empty)
            hashes = {name: _write_pieces(file, tensor) for name, tensor in tensors.items()}
            file.seek(0)
            file.write(_header(key, metadata, tensors, hashes))
            file.flush()
            os.fsync(file.fileno())
    except ArtifactError as fault:
        raise CacheFileError(str(fault)) from fault
    return size


def _private(path: str, flags: int) -> int:
    """Open a file that others may not read: a cache tells what its text says."""
    return os.open(path, flags, 0o600)


def _header(key: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], hashes: Mapping[str, str]) -> bytes:
    """Return the file up to its tensors; its length does not depend on the hashes."""
    sealed = dict(metadata) | {HASHES: dict(hashes)}
    sealed[SEAL] = metadata_sha256(sealed)
    table: dict[str, Any] = {"__metadata__": {key: canonical(sealed)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        table[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _begun(tensor: Tensor) -> Any:
    """Return the hash of a tensor before its numbers."""
    return hashlib.sha256(f"{CODES[tensor.dtype]} {list(tensor.shape)}".encode())


def _write_pieces(file: IO[bytes], tensor: Tensor) -> str:
    """Write the numbers of a tensor; return its hash."""
    found = _begun(tensor)
    for piece in tensor.flatten(0, 1) if tensor.dim() > 2 else (tensor,):
        content = _bytes(piece.detach().cpu().contiguous())
        file.write(content)
        found.update(content)
    return str(found.hexdigest())


def _bytes(contiguous: Tensor) -> Any:
    return contiguous.flatten().view(torch.uint8).numpy()


@contextmanager
def opened(path: Path, key: str) -> Iterator[tuple[dict[str, Any], Callable[[Sequence[str]], list[Tensor]]]]:
    """Open a file that `write` made: yield its metadata, and a function that reads tensors by their names.

    That function checks the hash of what it reads. The tensors are mapped from the file, so that copies of them need
    memory, but not they themselves.

    Raises:
        CacheFileError: the file cannot be read, is of another kind, or is damaged; without the path.
    """
    try:
        if not path.is_file():
            raise ArtifactError("is a folder" if path.is_dir() else "there is no such file")
        with safe_open(path, "pt") as file, ThreadPoolExecutor(torch.get_num_threads()) as pool:
            text = (file.metadata() or {}).get(key)
            if text is None:
                raise ArtifactError(f"its metadata have no {key}, so it is another kind of file")
            metadata = strict_json("metadata", text.encode())
            hashes = metadata.get(HASHES)
            if metadata.get(SEAL) != metadata_sha256(metadata) or not isinstance(hashes, dict):
                raise damaged("the metadata do not have their sha256")
            if set(file.keys()) != set(hashes):
                raise damaged("its tensors are not those that the metadata name")

            def fetch(name: str) -> Tensor:
                if name not in hashes:
                    raise damaged(f"{name} is missing")
                tensor: Tensor = file.get_tensor(name)
                if tensor.dtype not in CODES:
                    raise damaged(f"{name} is {tensor.dtype}")
                found = _begun(tensor)
                found.update(_bytes(tensor))
                if found.hexdigest() != hashes[name]:
                    raise damaged(f"{name} does not have its sha256")
                return tensor

            yield metadata, lambda names: list(pool.map(fetch, names))
    except SafetensorError as fault:
        raise damaged(f"cut off, or no such file: {one_line(fault)}") from None
    except (ArtifactError, UnicodeError) as fault:
        raise CacheFileError(one_line(fault)) from None
    except OSError as fault:
        raise CacheFileError(f"cannot be read: {why(fault)}") from fault
