"""The exceptions of this package. `BPCError` is their base class."""

from bpc_artifacts.errors import BPCError

__all__ = [
    "BPCError",
    "CacheFileError",
    "CorpusError",
    "InputError",
    "ModelError",
    "WorkError",
    "first_line",
    "is_out_of_memory",
    "not_text",
]

# Of errors without a type of their own: torch's on a CPU, and the system's.
NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc")


class InputError(BPCError, ValueError):
    """An argument is out of range, or the shapes or dtypes of tensors do not fit together."""


class ModelError(BPCError):
    """A model cannot be loaded or is not supported."""


class CorpusError(BPCError):
    """A text cannot be found, read or used."""


class CacheFileError(BPCError):
    """A saved cache cannot be written or read, is damaged, or belongs to another model."""


class WorkError(BPCError):
    """A work folder is in use, is damaged, cannot be written, or belongs to another calibration."""


def first_line(fault: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return lines[0][:300]


def is_out_of_memory(fault: BaseException) -> bool:
    """Return whether an error of Python, torch or the system says that memory is lacking."""
    if isinstance(fault, MemoryError) or type(fault).__name__ == "OutOfMemoryError":  # torch's
        return True
    return isinstance(fault, RuntimeError | OSError) and any(words in str(fault) for words in NO_MEMORY)


def not_text(fault: UnicodeError) -> str:
    """Return "not UTF-8 text" and where, or what to do with a PDF or a document of an office program."""
    if not isinstance(fault, UnicodeDecodeError):
        return "not UTF-8 text"
    if fault.object.startswith((b"%PDF", b"PK\3\4")):
        return "not UTF-8 text but a document: save its text to a file first, as pdftotext does with a PDF"
    return f"not UTF-8 text (byte {fault.start:,})"
