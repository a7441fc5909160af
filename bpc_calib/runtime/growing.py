"""Buffers that grow along the token dimension without a full copy at every step."""

import torch
from torch import Tensor

from bpc_calib.backends.pages import in_huge_pages

__all__ = ["append", "grown", "reserve"]

LEAST_ROOM = 256  # tokens


def append(buffer: Tensor | None, length: int, new: Tensor) -> Tensor:
    """Write `new` after the first `length` tokens of `buffer`; return the buffer, or a larger copy if it was full.

    Args:
        buffer: None: no buffer yet.
        new: `[batch, heads, tokens, ...]`.
    """
    if buffer is None:
        buffer = new.new_empty(*new.shape[:2], 0, *new.shape[3:])
    buffer = grown(buffer, length, length + new.shape[2])
    buffer.narrow(2, length, new.shape[2]).copy_(new.detach() if new.requires_grad else new)
    return buffer


def grown(buffer: Tensor, length: int, needed: int) -> Tensor:
    """Return a buffer that may be written, with room for `needed` tokens, of which the first `length` are kept.

    A full buffer `[batch, heads, room, ...]` is copied into one with a sixteenth more room. So each token is copied
    about sixteen times in total, and at most a sixteenth of the memory is unused. The room is zeros: torch's flex
    attention on a CPU reads a little of it, and what memory held before can change its result.
    """
    if needed > buffer.shape[2] or not writable(buffer):
        room = _aligned(needed + max(LEAST_ROOM, needed // 16))
        larger = in_huge_pages(buffer.new_empty(*buffer.shape[:2], room, *buffer.shape[3:]))
        larger[:, :, :length] = buffer[:, :, :length]
        larger[:, :, needed:] = 0
        buffer = larger
    return buffer


def reserve(buffer: Tensor, length: int, room: int) -> Tensor:
    """Return a buffer with at least `room` tokens, copied if needed: the first `length` tokens, then zeros.

    Args:
        buffer: `[batch, heads, tokens, ...]`.
        length: tokens to keep.
        room: tokens.
    """
    if room > buffer.shape[2] or not writable(buffer):
        larger = in_huge_pages(buffer.new_empty(*buffer.shape[:2], _aligned(room), *buffer.shape[3:]))
        larger[:, :, :length] = buffer[:, :, :length]
        buffer = larger
    buffer[:, :, length:] = 0
    return buffer


def writable(buffer: Tensor) -> bool:
    """Return whether the buffer may be written: a tensor made in inference mode is read-only outside of it."""
    return torch.is_inference_mode_enabled() or not buffer.is_inference()


def _aligned(tokens: int) -> int:
    """Round up to a multiple of 16 tokens, which keeps rows aligned for wide loads."""
    return -(-tokens // 16) * 16
