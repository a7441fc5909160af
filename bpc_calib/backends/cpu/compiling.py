"""How functions are compiled here, and where the kernels are kept."""

import functools
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba

from bpc_calib.method import encoded, scoring

__all__ = ["compiled", "inlined", "kernel_folder", "stamp"]


def compiled(function: Any = None, *, parallel: bool = False, **options: Any) -> Any:
    """A kernel, without checks of bounds and divisions; what numba makes of it is kept for the next process."""
    if function is None:
        return functools.partial(compiled, parallel=parallel, **options)
    folder = kernel_folder()
    with _kept_in(folder):
        return numba.njit(
            parallel=parallel, nogil=True, error_model="numpy", boundscheck=False, cache=folder is not None, **options
        )(function)


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """Have numba keep there what it compiles of the functions that are decorated inside the `with` block.

    numba alone would choose a folder itself, and notice changes in a kernel's own file only. This folder belongs to one
    state of all sources (`stamp`).
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = "" if folder is None else str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def inlined(function: Any = None, **options: Any) -> Any:
    """A part of kernels, compiled with them.

    The body of a parallel loop is one such call: numba rewrites what stands in the loop itself, and not always rightly.
    """
    if function is None:
        return functools.partial(inlined, **options)
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False, **options)(function)


def stamp() -> str:
    """Of the sources that kernels are compiled from: what was compiled from others is stale."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    sources += [Path(str(module.__file__)) for module in (encoded, scoring)]  # `constants` are theirs
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in sources)).hexdigest()[:16]


def kernel_folder() -> Path | None:
    """The folder for kernels of these sources, mode 0700; None where no folder can be the user's alone.

    `NUMBA_CACHE_DIR` names another place than the user's cache folder.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get("NUMBA_CACHE_DIR")
    above = (Path(named) if named else Path(home, "bpc")).expanduser() / "bpc-numba"
    try:
        above.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = above.lstat()
        if not stat.S_ISDIR(found.st_mode) or (os.name == "posix" and _others_write(found)):
            return None
        folder = above / stamp()
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):  # not writable, or no home
        return None
    return folder


def _others_write(found: os.stat_result) -> bool:
    return found.st_uid != os.getuid() or bool(found.st_mode & 0o077)
