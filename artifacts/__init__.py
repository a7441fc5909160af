"""The projection artifact of BPC: its format, and functions to load, save and check it."""

from bpc_artifacts.errors import ArtifactError, BPCError
from bpc_artifacts.file import check_writable, load, save
from bpc_artifacts.match import check_model
from bpc_artifacts.schema import LayerProjection, ProjectionArtifact
from bpc_artifacts.verdict import verdict

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
