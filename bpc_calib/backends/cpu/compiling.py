"""How functions are compiled here, and where the kernels are kept."""

import functools
from typing import Any

import numba

from bpc_calib.backends.cpu.folder import kernel_folder, stamp
from bpc_calib.compat import keep_compiled

__all__ = ["compiled", "inlined"]


def compiled(function: Any = None, *, parallel: bool = False, **options: Any) -> Any:
    """A kernel, without checks of bounds and divisions; what numba makes of it is kept for the next process."""
    if function is None:
        return functools.partial(compiled, parallel=parallel, **options)
    kernel = numba.njit(parallel=parallel, nogil=True, error_model="numpy", boundscheck=False, **options)(function)
    folder = kernel_folder()
    if folder is not None:
        keep_compiled(kernel, folder, stamp())
    return kernel


def inlined(function: Any = None, **options: Any) -> Any:
    """A part of kernels, compiled with them.

    The body of a parallel loop is one such call: numba rewrites what stands in the loop itself, and not always rightly.
    """
    if function is None:
        return functools.partial(inlined, **options)
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False, **options)(function)
