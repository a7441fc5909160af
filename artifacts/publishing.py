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

    The names are those of the model and of the texts; the path of a local text becomes its name, so that `NAME=PATH`
    publishes NAME alone. The tensors stay as they are. A name without a revision counts as local, because `ORG/NAME`
    looks like a path.

    Raises:
        ArtifactError: there is a key that the format does not name, or another field holds a local path.
    """
    if unknown := unknown_keys(artifact.metadata):
        raise ArtifactError(
            f"{unknown[0]}: the format has no such key, and it may hold something private: remove it with "
            "bpc_artifacts.load and bpc_artifacts.save, or upgrade bpc-calib if a newer version wrote the file"
        )
    metadata = deepcopy(dict(artifact.metadata))
    model = metadata["model"]
    changed = _replace("metadata.model", model, "id", model["id"])
    for i, source in enumerate(metadata["calibration"]["sources"]):
        where = f"metadata.calibration.sources[{i}]"
        changed += _replace(where, source, "name", source["name"])
        changed += _replace(where, source, "path", source["name"])
    for where, text in _strings("metadata", metadata):
        if _PATH.search(text):
            raise ArtifactError(
                f"{where}: holds a local path: change it with bpc_artifacts.load and bpc_artifacts.save, "
                "or calibrate again"
            )
    return ProjectionArtifact(artifact.layers, metadata), changed


def _replace(where: str, table: dict[str, Any], key: str, name: str) -> list[str]:
    """Replace a local path by the last part of a name; return the field if that changed it."""
    given, short = table[key], _last_part(name)
    local = _PATH.search(given) or (table["revision"] is None and not _GENERATED.fullmatch(given))
    if not local or given == short:
        return []
    table[key] = short
    return [f"{where}.{key}"]


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
