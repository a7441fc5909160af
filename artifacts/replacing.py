"""Write a file in one step, and replace only a file of the same kind; say beforehand whether that can be done."""

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bpc_artifacts.errors import ArtifactError, BPCError, why

__all__ = ["PICTURE", "Kind", "check_picture", "check_picture_name", "replacing", "try_replacing"]

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Kind:
    """What a file must be to be replaced; an empty file may always be replaced."""

    name: str
    holds: Callable[[Path], bool]


def _is_picture(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(1024)
    return head.startswith((b"\x89PNG", b"%PDF")) or b"<svg" in head or b"<!DOCTYPE svg" in head


PICTURE = Kind("a picture (PNG, SVG or PDF)", _is_picture)


def try_replacing(path: Path, size: int, overwrite: bool, kind: Kind | None = None) -> None:
    """Raise the `ArtifactError` that `replacing` would now raise for `size` bytes. Does not change the folder.

    Args:
        path: file to write.
        size: bytes that it will have.
        overwrite, kind: as in `replacing`.

    Raises:
        ArtifactError: as `replacing`, or the disk has too little room.
    """
    with _one_line(path):
        target = _target(path, overwrite, kind)
        with tempfile.TemporaryFile(dir=target.parent):  # has no name on Linux: a killed process leaves nothing
            if (free := shutil.disk_usage(target.parent).free) < size:
                raise OSError(errno.ENOSPC, f"{size:,} bytes are needed and {free:,} are free")


def check_picture(path: Path, overwrite: bool) -> None:
    """Raise a `BPCError` if the picture of `--plot` could not be written."""
    check_picture_name(path)
    try_replacing(path, 1 << 20, overwrite, PICTURE)


def check_picture_name(path: Path) -> None:
    """Raise a `BPCError` unless the name of a file says which kind of picture it is."""
    if path.suffix.lower() not in PICTURES:
        raise BPCError(f"{path}: a picture must be one of {', '.join(PICTURES)}")


@contextmanager
def replacing(path: Path, overwrite: bool, kind: Kind | None = None, *, locked: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`. At the end, that file replaces `path`.

    Args:
        path: file to write; of a link, its target.
        overwrite: whether an existing file may be replaced.
        kind: what an existing file must be; None: any regular file.
        locked: whether the caller holds a lock on `path`. The temporary file then has a fixed name, and the next caller
            removes what a killed process left of it.

    Raises:
        ArtifactError: there is no such folder; `path` exists and `overwrite` is false; it exists and is not of this
            kind; or it cannot be written.
    """
    with _one_line(path):
        target = _target(path, overwrite, kind)
        temporary = target.with_name(f".{target.name}.tmp" if locked else f".bpc-{secrets.token_hex(8)}.tmp")
        try:
            yield temporary
            if overwrite:
                os.replace(temporary, target)
            else:
                _rename_to_new(temporary, target)
        finally:
            with suppress(OSError):
                temporary.unlink()


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Say in an `ArtifactError` why `path` cannot be written."""
    try:
        yield
    except FileExistsError:
        message = f"{path}: exists; pass --force (overwrite=True in Python) to replace it"
        raise ArtifactError(message) from None
    except OSError as fault:
        raise ArtifactError(f"{path}: cannot be written: {why(fault)}") from fault


def _target(path: Path, overwrite: bool, kind: Kind | None) -> Path:
    """Return the file that a write would replace: the target of a link, not the link."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ArtifactError(f"{path}: there is no folder {path.parent}: make it first")
    if target.is_dir():
        raise ArtifactError(f"{path}: is a folder: give the path of a file")
    if target.exists() and not target.is_file():
        raise ArtifactError(f"{path}: is not a regular file")
    if kind is not None and target.exists() and target.stat().st_size and not kind.holds(target):
        raise ArtifactError(f"{path}: exists and is not {kind.name}, so it is never replaced: give another name")
    if target.exists() and not overwrite:
        raise FileExistsError
    return target


def _rename_to_new(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)  # unlike a rename, fails if another process has created the file
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError from None
        os.replace(temporary, target)
