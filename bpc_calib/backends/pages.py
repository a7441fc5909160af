"""Memory of the CPU in pages of 2 MB."""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["copied_to_huge_pages", "in_huge_pages"]

HUGE = 1 << 21  # bytes
LINE = 64  # bytes, at whose multiples copies begin


def in_huge_pages(fresh: Tensor) -> Tensor:
    """A tensor not yet written to; on a CPU, if it is large enough and Linux allows it, in pages of 2 MB.

    With small pages, looking up the pages of scattered rows takes as long as reading them.
    """
    advise, size = _advise(), fresh.untyped_storage().nbytes()
    if fresh.device.type == "cpu" and advise is not None and size >= 2 * HUGE:
        first = -(-fresh.untyped_storage().data_ptr() // HUGE) * HUGE
        last = (fresh.untyped_storage().data_ptr() + size) // HUGE * HUGE
        advise(first, last - first, mmap.MADV_HUGEPAGE)  # if Linux refuses, pages stay small
    return fresh


def copied_to_huge_pages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of contiguous tensors of a CPU that lie side by side, so that small ones, too, are in pages of 2 MB."""
    sizes = [-(-each.nbytes // LINE) * LINE for each in tensors]
    whole = in_huge_pages(torch.empty(sum(sizes) + LINE, dtype=torch.uint8))
    parts = whole[-whole.data_ptr() % LINE :][: sum(sizes)].split(sizes)
    copies = [part[: each.nbytes].view(each.dtype).view(each.shape) for part, each in zip(parts, tensors, strict=True)]
    for copied, each in zip(copies, tensors, strict=True):
        copied.copy_(each)
    return copies


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The C library's `madvise`, if there is one that knows huge pages."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
