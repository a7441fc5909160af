"""An artifact with all that `bpc inspect` was given about it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["Inspected"]


@dataclass(frozen=True)
class Inspected:
    """A checked artifact, the words that named it, its file, its Hub commit, and a result of `bpc eval` with it."""

    name: str
    path: Path
    commit: str | None  # None: a local file
    artifact: "ProjectionArtifact"
    evaluation: dict[str, Any] | None = None
