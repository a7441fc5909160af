"""The artifact as it may be published: without local paths, and without keys that nobody has checked."""

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from bpc_artifacts.errors import ArtifactError
from bpc_artifacts.schema import ProjectionArtifact, unknown_keys

__all__ = ["publishable"]

# The beginning of a local path, also inside a sentence: /home, ~/, ./, ../, C:\, \\server or file:
_PATH = re.compile(r"""(?:^|[\s"'(\[=:,;])(?:~[\w.-]*[/\\]|\.{1,2}[/\\]|/[^/\s]|[A-Za-z]:[/\\]|\\\\|file:)""")
_GENERATED = re.compile(r"demo/[a-z]+")  # the path of generated text


def publishable(artifact: ProjectionArtifact) -> tuple[ProjectionArtifact, list[str]]:
    """Return the artifact with the last parts of local paths as names, and the fields that this changed.

    The names are those of the model and of the texts; the tensors stay as they are. A name without a revision counts as
    local, because `ORG/NAME` looks like a path.

    Raises:
        ArtifactError: there is a key that the format does not name, or another field holds a local path.
    """
    if unknown := unknown_keys(artifact.metadata):
        raise ArtifactError(
            f"{unknown[0]}: the format has no such key, and it may hold something private: remove it with "
            "bpc_artifacts.load and bpc_artifacts.save, or upgrade bpc-calib if a newer version wrote the file"
        )
    metadata = deepcopy(dict(artifact.metadata))
    changed = _shorten("metadata.model", metadata["model"], ("id",))
    for i, source in enumerate(metadata["calibration"]["sources"]):
        changed += _shorten(f"metadata.calibration.sources[{i}]", source, ("name", "path"))
    for where, text in _strings("metadata", metadata):
        if _PATH.search(text):
            raise ArtifactError(
                f"{where}: holds a local path: change it with bpc_artifacts.load and bpc_artifacts.save, "
                "or calibrate again"
            )
    return ProjectionArtifact(artifact.layers, metadata), changed


def _shorten(where: str, table: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Replace names that are local paths by their last parts; return the fields that changed."""
    changed = []
    for key in names:
        name = table[key]
        local = _PATH.search(name) or (table["revision"] is None and not _GENERATED.fullmatch(name))
        if local and (short := _last_part(name)) != name:
            table[key] = short
            changed.append(f"{where}.{key}")
    return changed


def _last_part(path: str) -> str:
    parts = [part for part in re.split(r"[/\\]", path) if part not in ("", ".", "..", "~")]
    return parts[-1] if parts else "local"


def _strings(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every string with its place; the keys of tables count, too."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield where, key
            yield from _strings(f"{where}.{key}", inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _strings(f"{where}[{i}]", inner)
