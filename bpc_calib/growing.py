"""Tensors that grow along their tokens without a copy of the whole at every step."""

import torch
from torch import Tensor

__all__ = ["append"]

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
    # A tensor of inference mode cannot be written to outside of it.
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    if buffer is None or needed > buffer.shape[2] or frozen:
        room = -(-(needed + max(LEAST_ROOM, needed // 16)) // 16) * 16  # rows stay aligned for wide loads
        larger = new.new_empty(*new.shape[:2], room, *new.shape[3:])
        if buffer is not None:
            larger[:, :, :length] = buffer[:, :, :length]
        buffer = larger
    buffer[:, :, length:needed] = new.detach()
    return buffer
