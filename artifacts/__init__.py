"""The projection artifact of BPC: what is in the file, reading, writing and checking it."""

from bpc_artifacts.errors import ArtifactError, BPCError

__all__ = ["ArtifactError", "BPCError"]
