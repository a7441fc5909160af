"""Load and save the artifact: one safetensors file, completely checked before use and written atomically."""

import hashlib
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from bpc_artifacts.errors import ArtifactError, why
from bpc_artifacts.replacing import Kind, replacing, try_replacing
from bpc_artifacts.schema import LayerProjection, ProjectionArtifact, check, check_version, format_version
from bpc_artifacts.sealed import SEAL, canonical, header_matches, metadata_sha256, one_line, strict_json

__all__ = ["check_writable", "load", "save"]

MAX_HEADER = 1 << 20  # bytes
MAX_FILE = 4 << 30  # bytes; the artifact of the largest open model has about 0.1 GB

_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(projection|vectors|residual|metric|mean|need|need_short)")
_OURS = re.compile(rb'"__metadata__"\s*:\s*\{[^{}]*"bpc"\s*:')  # also in a header that is damaged elsewhere


def load(path: str | os.PathLike[str]) -> ProjectionArtifact:
    """Read and check an artifact of format version 1 or 3.

    Raises:
        ArtifactError: the file is missing, is damaged, has a newer format, or holds a value that the format does not
            allow; the message has the file, the place, the value and the expected value.
    """
    path = Path(path)
    try:
        return _parse(_read(path))
    except ArtifactError as fault:
        raise ArtifactError(f"{path}: {fault}") from None
    except OSError as fault:
        raise ArtifactError(f"{path}: cannot be read: {why(fault)}") from fault


def save(artifact: ProjectionArtifact, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Check an artifact and write it. The same artifact always produces the same bytes.

    Writes a temporary file in the target's folder, then replaces the target in one step; a failure does not
    change the folder. Sets the metadata keys `format_version`, `key_space`, `layers` and the two checksums.

    Raises:
        ArtifactError: the artifact is not valid, the file exists and `overwrite` is false, the file exists and is
            neither an artifact nor empty, or the file cannot be written.
    """
    metadata = dict(artifact.metadata) | {
        "format_version": format_version(artifact),
        "key_space": "post_rope",
        "layers": list(artifact.layers),
        "payload_sha256": "",
        SEAL: "",
    }
    check(ProjectionArtifact(artifact.layers, metadata))
    tensors = {name: np.ascontiguousarray(array) for name, array in artifact.tensors().items()}
    payload = _payload(safetensors.numpy.save(tensors))
    metadata["payload_sha256"] = hashlib.sha256(payload).hexdigest()
    try:
        metadata[SEAL] = metadata_sha256(metadata)
    except (TypeError, ValueError) as fault:
        raise ArtifactError(f"metadata: not JSON: {one_line(fault)}") from fault
    blob = safetensors.numpy.save(tensors, {"bpc": canonical(metadata)})
    if len(blob) - len(payload) - 8 > MAX_HEADER:
        raise ArtifactError("the metadata is larger than 1 MiB")
    with replacing(Path(path), overwrite, ARTIFACT) as temporary:
        temporary.write_bytes(blob)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())


def check_writable(path: str | os.PathLike[str], size: int, *, overwrite: bool = False) -> None:
    """Raise the `ArtifactError` that `save` would now raise for `size` bytes. Does not change the folder."""
    try_replacing(Path(path), size, overwrite, ARTIFACT)


def _is_artifact(path: Path) -> bool:
    """Whether the header of a file says that it is an artifact; the rest may be damaged."""
    return header_matches(path, _OURS, MAX_HEADER)


ARTIFACT = Kind("a BPC artifact", _is_artifact)


def _read(path: Path) -> bytes:
    """Return the bytes of a file after a check of its type, its size and the size of its header."""
    if path.is_dir():
        raise ArtifactError("is a folder: give the path of a file")
    if path.exists() and not path.is_file():  # a read from a pipe would never end
        raise ArtifactError("is not a regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise ArtifactError(f"not a safetensors file: {len(head)} bytes, expected at least 8")
        length = struct.unpack("<Q", head)[0]
        if length > MAX_HEADER or length < 2:
            raise ArtifactError(f"not a BPC artifact: the header claims {length:,} bytes, expected 2 to {MAX_HEADER:,}")
        if size > MAX_FILE:
            raise ArtifactError(f"not a BPC artifact: {size:,} bytes, expected at most {MAX_FILE:,}")
        header = file.read(length)
        if len(header) < length:
            raise ArtifactError(f"truncated: {size:,} bytes, expected more than {8 + length:,}")
        return head + header + file.read()


def _parse(blob: bytes) -> ProjectionArtifact:
    length = struct.unpack("<Q", blob[:8])[0]
    header = strict_json("the safetensors header", blob[8 : 8 + length])
    strings = header.pop("__metadata__", None)
    if not isinstance(strings, dict) or not isinstance(strings.get("bpc"), str):
        raise ArtifactError("not a BPC artifact: the metadata key 'bpc' is missing")
    metadata = strict_json("metadata", strings["bpc"].encode("utf-8", "surrogatepass"))
    check_version(metadata)
    for name, entry in header.items():
        if not _TENSOR.fullmatch(name):
            raise ArtifactError(f"{name[:80]}: not a tensor of this format")
        if not isinstance(entry, dict) or entry.get("dtype") != "F32":
            found = entry.get("dtype") if isinstance(entry, dict) else entry
            raise ArtifactError(f"{name}: expected F32, found {str(found)[:40]}")
    try:
        tensors = safetensors.numpy.load(blob)
    except (safetensors.SafetensorError, ValueError, KeyError) as fault:
        raise ArtifactError(f"damaged or truncated: {one_line(fault)}") from fault

    layers: dict[int, dict[str, Any]] = {}
    for name, array in tensors.items():
        _, index, kind = name.split(".")
        layers.setdefault(int(index), {})[kind] = array
    made: dict[int, LayerProjection] = {}
    for index, arrays in sorted(layers.items()):
        try:
            made[index] = LayerProjection.of(arrays)
        except ArtifactError as fault:
            raise ArtifactError(f"layers.{index}.{fault}") from None
    artifact = ProjectionArtifact(made, metadata)
    check(artifact)
    for what, key, found in (
        ("tensors", "payload_sha256", hashlib.sha256(_payload(blob)).hexdigest()),
        ("metadata", SEAL, metadata_sha256(metadata)),
    ):
        if found != metadata[key]:
            raise ArtifactError(
                f"damaged: the sha256 of its {what} is {found[:16]}..., "
                f"expected {metadata[key][:16]}...: get the file again"
            )
    return artifact


def _payload(blob: bytes) -> memoryview:
    return memoryview(blob)[8 + struct.unpack("<Q", blob[:8])[0] :]
