"""The exceptions of BPC. Each message is one line: what was wrong, where, and what to do."""

__all__ = ["ArtifactError", "BPCError"]


class BPCError(Exception):
    """Anything BPC refuses or cannot do."""


class ArtifactError(BPCError):
    """A projection file that cannot be read, written or used with a model."""
