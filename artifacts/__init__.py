"""The projection artifact of BPC: its format, and functions to load, save and check it.

What needs numpy is imported when it is first used: a command that refuses an option needs the errors alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bpc_artifacts.errors import ArtifactError, BPCError
from bpc_artifacts.match import check_model
from bpc_artifacts.verdict import verdict

if TYPE_CHECKING:
    from bpc_artifacts.file import check_writable, load, save
    from bpc_artifacts.schema import LayerProjection, ProjectionArtifact

__all__ = [
    "ArtifactError",
    "BPCError",
    "LayerProjection",
    "ProjectionArtifact",
    "check_model",
    "check_writable",
    "load",
    "save",
    "verdict",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "schema" if name in ("LayerProjection", "ProjectionArtifact") else "file"
    return getattr(import_module(f"{__name__}.{home}"), name)
