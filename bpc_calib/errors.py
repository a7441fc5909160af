"""The exceptions of the method and of calibration; `BPCError` is the parent of them all."""

from bpc_artifacts.errors import BPCError

__all__ = ["BPCError", "CorpusError", "InputError", "ModelError", "first_line"]


class InputError(BPCError, ValueError):
    """An argument out of range, or tensors whose shapes or dtypes do not fit together."""


class ModelError(BPCError):
    """A model that cannot be loaded or cannot be served."""


class CorpusError(BPCError):
    """Text that cannot be found, read or used."""


def first_line(fault: BaseException) -> str:
    """The first line of an error's text, or its type."""
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return lines[0][:300]
