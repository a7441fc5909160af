"""What the libraries print: BPC's own warnings, one line each, and nothing from the libraries that it uses."""

import logging
import os

from bpc_cli.console import printable
from bpc_cli.progress import shows_bars

__all__ = ["quiet_libraries"]


def quiet_libraries(*, quiet: bool = False, warnings: bool = True) -> None:
    """Set up what libraries print. Call it before they are imported, because they read their settings then.

    Args:
        quiet: hide the progress of downloads and loading, which only a terminal shows.
        warnings: show BPC's own warnings.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    handler.addFilter(_Once())
    ours = logging.getLogger("bpc_calib")
    ours.handlers = [handler]
    ours.setLevel(logging.WARNING if warnings else logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)  # of libraries without a setting of their own, such as accelerate
    for library in ("TRANSFORMERS", "DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not shows_bars(quiet):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")


class _OneLine(logging.Formatter):
    """Messages without line breaks and control characters; those that tell of progress warn of nothing."""

    def format(self, record: logging.LogRecord) -> str:
        text = printable(super().format(record))
        return text[:1].upper() + text[1:] if getattr(record, "progress", False) else f"Warning: {text}"


class _Once(logging.Filter):
    """Each message once: a command may check the same artifact several times."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self.seen
        self.seen.add(message)
        return new
