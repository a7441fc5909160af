"""Tensors that grow along their tokens without a copy of the whole at every step."""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["append", "in_huge_pages"]

LEAST_ROOM = 256  # tokens
HUGE = 1 << 21  # bytes


def append(buffer: Tensor | None, length: int, new: Tensor) -> Tensor:
    """Write `new` behind the first `length` tokens of `buffer` and return the buffer, a larger one if it was full.

    A buffer `[batch, heads, room, ...]` that is full is copied once into one with room for a sixteenth
    more, so a token is copied some sixteen times in all, and at most that share of memory is spare.

    Args:
        buffer: None for none yet.
        new: `[batch, heads, tokens, ...]`.
    """
    needed = length + new.shape[2]
    # A tensor of inference mode cannot be written to outside of it.
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    if buffer is None or needed > buffer.shape[2] or frozen:
        room = -(-(needed + max(LEAST_ROOM, needed // 16)) // 16) * 16  # rows stay aligned for wide loads
        larger = in_huge_pages(new.new_empty(*new.shape[:2], room, *new.shape[3:]))
        if buffer is not None:
            larger[:, :, :length] = buffer[:, :, :length]
        buffer = larger
    buffer[:, :, length:needed] = new.detach()
    return buffer


def in_huge_pages(fresh: Tensor) -> Tensor:
    """The same tensor, not yet written to; on Linux's CPU in pages of 2 MB where it has that many bytes.

    Rows read here and there would wait for the tables of small pages as long as for themselves.
    """
    advise, size = _advise(), fresh.untyped_storage().nbytes()
    if fresh.device.type == "cpu" and advise is not None and size >= 2 * HUGE:
        first = -(-fresh.untyped_storage().data_ptr() // HUGE) * HUGE
        last = (fresh.untyped_storage().data_ptr() + size) // HUGE * HUGE
        advise(first, last - first, mmap.MADV_HUGEPAGE)  # where it is refused, pages stay small
    return fresh


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
