"""Tensors that grow along their tokens without a copy of the whole at every step."""

import torch
from torch import Tensor

from bpc_calib.backends.pages import in_huge_pages

__all__ = ["append", "reserve"]

LEAST_ROOM = 256  # tokens


def append(buffer: Tensor | None, length: int, new: Tensor) -> Tensor:
    """Write `new` behind the first `length` tokens of `buffer` and return the buffer, a larger one if it was full.

    A buffer `[batch, heads, room, ...]` that is full is copied once into one with room for a sixteenth
    more, so a token is copied some sixteen times in all, and at most that share of memory is spare.

    Args:
        buffer: None for none yet.
        new: `[batch, heads, tokens, ...]`.
    """
    needed = length + new.shape[2]
    if buffer is None or needed > buffer.shape[2] or not _writable(buffer):
        room = _aligned(needed + max(LEAST_ROOM, needed // 16))
        larger = in_huge_pages(new.new_empty(*new.shape[:2], room, *new.shape[3:]))
        if buffer is not None:
            larger[:, :, :length] = buffer[:, :, :length]
        buffer = larger
    buffer[:, :, length:needed] = new.detach()
    return buffer


def reserve(buffer: Tensor, length: int, room: int) -> Tensor:
    """The buffer, or a larger copy of its first `length` tokens where it has no `room`; behind them it holds 0."""
    if room > buffer.shape[2] or not _writable(buffer):
        larger = in_huge_pages(buffer.new_empty(*buffer.shape[:2], _aligned(room), *buffer.shape[3:]))
        larger[:, :, :length] = buffer[:, :, :length]
        buffer = larger
    buffer[:, :, length:] = 0
    return buffer


def _writable(buffer: Tensor) -> bool:
    """A tensor of inference mode cannot be written to outside of it."""
    return torch.is_inference_mode_enabled() or not buffer.is_inference()


def _aligned(tokens: int) -> int:
    """Rows of so many tokens stay aligned for wide loads."""
    return -(-tokens // 16) * 16
