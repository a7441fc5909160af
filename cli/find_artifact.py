"""Finding an artifact: a file on this machine, or one on the Hub."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from bpc_cli.console import fail

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["find_artifact", "load_artifact"]


def find_artifact(name: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The file that a path or a Hub id names, and the Hub commit (None for a path)."""
    path = Path(os.path.expanduser(name))
    parts = name.split("/")
    if os.path.exists(path) or len(parts) < 2 or not all(parts) or parts[0] in (".", "..", "~"):
        if revision is not None:
            fail(f"{name} is a file, and only artifacts on the Hub have revisions: omit --revision")
        return path, None
    if len(parts) == 2 and name.endswith(".safetensors"):  # FOLDER/FILE, mistyped
        return path, None
    from bpc_calib.hub import fetch_artifact

    return fetch_artifact(name, revision)


def load_artifact(name: str) -> "ProjectionArtifact":
    """The artifact that a path or a Hub id names."""
    from bpc_artifacts import load

    return load(find_artifact(name)[0])
