"""Finding an artifact: a file on this machine, or one on the Hub."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from bpc_cli.console import fail

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["find_artifact", "load_artifact", "split_revision"]


def find_artifact(name: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The file that a path or a Hub id names, and the Hub commit (None for a path).

    A Hub id may end with its revision: `ORG/NAME@COMMIT`.
    """
    path = Path(os.path.expanduser(name))
    parts = name.partition("@")[0].split("/")
    if os.path.exists(path) or len(parts) < 2 or not all(parts) or parts[0] in (".", "..", "~"):
        if revision is not None:
            fail(f"{name} is a file, and only artifacts on the Hub have revisions: omit --revision")
        return path, None
    if len(parts) == 2 and name.endswith(".safetensors"):  # FOLDER/FILE, mistyped
        return path, None
    from bpc_calib.hub import fetch_artifact

    repository, revision = split_revision(name, revision)
    return fetch_artifact(repository, revision)


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """The Hub id and the revision of `ORG/NAME@REVISION`; `revision` is that of --revision."""
    repository, at, named = name.partition("@")
    if at and (not named or revision is not None):
        fail(f"{name}: give one revision, as {repository}@REVISION or with --revision")
    return repository, named or revision


def load_artifact(name: str) -> "ProjectionArtifact":
    """The artifact that a path or a Hub id names."""
    from bpc_artifacts import load

    return load(find_artifact(name)[0])
