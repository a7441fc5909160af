"""Files that are whole or absent, whenever the process or the machine stops, and a lock that dies with its process."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from bpc_artifacts.errors import why
from bpc_calib.errors import WorkError

__all__ = ["locked", "make_folder", "sync_folder", "wait_for", "write_file"]

SEEN_WITHIN = 120.0  # seconds: a shared file system may show old names for a minute


def write_file(path: Path, blob: bytes) -> None:
    """Write a file in one step: a reader finds the former content or all of the new one.

    Raises:
        WorkError: the file cannot be written; nothing changed.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # one name: the next attempt replaces what a killed run left
    try:
        with open(temporary, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as fault:
        with suppress(OSError):
            temporary.unlink()
        room = ""
        with suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            room = f" ({len(blob):,} bytes are needed and {free:,} are free)"
        raise WorkError(
            f"{path}: cannot be written: {why(fault)}{room}; make room, then the same command goes on"
        ) from fault


def make_folder(path: Path) -> None:
    """Make a folder and those above it. Raises `WorkError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise WorkError(f"{path}: this folder cannot be made: {why(fault)}") from fault


def wait_for(files: list[Path]) -> None:
    """Wait until files of one folder, which other machines may have written, are seen here.

    Raises:
        WorkError: some are not.
    """
    until = time.monotonic() + SEEN_WITHIN
    folder, names = files[0].parent, {file.name for file in files}
    while lacking := names - set(os.listdir(folder)):
        if time.monotonic() > until:
            raise WorkError(
                f"{folder}: {len(lacking)} files of other ranks are missing: give a --work-dir that all machines share"
            )
        time.sleep(0.5)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a loss of power, where the system can do that."""
    if os.name != "nt":  # Windows opens no folders
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def locked(path: Path, taken: str) -> Iterator[None]:
    """Hold the lock file `path`, and remove it at the end: a lock of the system, which a killed process does not keep.

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
