"""Metadata as strict JSON that carries its own hash: no flipped byte in it goes unnoticed."""

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from bpc_artifacts.errors import ArtifactError

__all__ = ["SEAL", "canonical", "header_matches", "metadata_sha256", "one_line", "strict_json"]

SEAL = "metadata_sha256"  # the key of the hash


def canonical(metadata: Mapping[str, Any]) -> str:
    """Return metadata as JSON that is the same text for the same values."""
    return json.dumps(metadata, sort_keys=True, separators=(",", ":"), allow_nan=False)


def metadata_sha256(metadata: Mapping[str, Any]) -> str:
    """Return the hash of all metadata except this hash, which detects a flipped byte in the header too."""
    rest = {key: value for key, value in metadata.items() if key != SEAL}
    return hashlib.sha256(canonical(rest).encode()).hexdigest()


def header_matches(path: Path, pattern: re.Pattern[bytes], most: int) -> bool:
    """Return whether a safetensors header of at most so many bytes matches; the rest of the file may be damaged."""
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        return 2 <= length <= most and pattern.search(file.read(length)) is not None


def strict_json(what: str, text: bytes) -> dict[str, Any]:
    """Parse one JSON object without duplicate keys or NaN; `what` names it in the `ArtifactError`."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a key occurs twice")
        return table

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else no_constant(digits[:20])

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant, parse_float=finite)
    except (ValueError, RecursionError) as fault:
        raise ArtifactError(f"{what}: not valid JSON: {one_line(fault)}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value


def one_line(fault: Exception) -> str:
    """Return the message of an error in one line, cut after 200 characters."""
    return " ".join(str(fault).split())[:200]
