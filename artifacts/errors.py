"""The exceptions of BPC. Each message is one line and says what was wrong, where, and what to do."""

import os

__all__ = ["ArtifactError", "BPCError", "why"]


class BPCError(Exception):
    """BPC refuses a request or cannot complete it."""


class ArtifactError(BPCError):
    """A projection file cannot be read, written or used with a model."""


def why(fault: OSError) -> str:
    """Return what the system says of a file, and where a symbolic link leads that leads nowhere."""
    text = fault.strerror or " ".join(str(fault).split())
    if isinstance(fault, FileNotFoundError) and fault.filename and os.path.islink(fault.filename):
        text += f" (it is a link to {os.path.realpath(fault.filename)})"
    return text
