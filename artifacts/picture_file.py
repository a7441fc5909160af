"""Whether a picture can be drawn into a file, asked before the work that it would show."""

from pathlib import Path

from bpc_artifacts.errors import BPCError
from bpc_artifacts.replacing import PICTURE, try_replacing

__all__ = ["check_matplotlib", "check_picture"]

KNOWN = (".png", ".svg", ".pdf")


def check_picture(path: Path, overwrite: bool) -> None:
    """Raise a `BPCError` if the picture of `--plot` could not be written."""
    if path.suffix.lower() not in KNOWN:
        raise BPCError(f"{path}: a picture must be one of {', '.join(KNOWN)}")
    check_matplotlib("--plot needs")
    try_replacing(path, 1 << 20, overwrite, PICTURE)


def check_matplotlib(needs: str) -> None:
    """Raise a `BPCError` that begins with `needs` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as fault:
        raise BPCError(f"{needs} matplotlib: pip install matplotlib") from fault
