"""One run at a time: a lock of the operating system, which a killed process does not keep."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from bpc_artifacts.errors import why
from bpc_calib.errors import WorkError

__all__ = ["locked"]


@contextmanager
def locked(path: Path, taken: str) -> Iterator[None]:
    """Hold the lock file `path`, and remove it at the end.

    Raises:
        WorkError: another process holds it, with the message `taken`; or the file cannot be made.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise WorkError(taken) from None
    except OSError as fault:
        raise WorkError(f"{path}: cannot be written: {why(fault)}") from fault
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is held: a process that waits for the removed file notices that
        lock.release()
