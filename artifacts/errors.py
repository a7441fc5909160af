"""The exceptions of BPC. Each message is one line and says what was wrong, where, and what to do."""

__all__ = ["ArtifactError", "BPCError"]


class BPCError(Exception):
    """BPC refuses a request or cannot complete it."""


class ArtifactError(BPCError):
    """A projection file cannot be read, written or used with a model."""
