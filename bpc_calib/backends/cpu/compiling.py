"""How functions are compiled here, and where the kernels are kept."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba

from bpc_calib.backends.cpu.folder import kernel_folder

__all__ = ["compiled", "inlined"]


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
    state of all sources (`folder.stamp`).
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
