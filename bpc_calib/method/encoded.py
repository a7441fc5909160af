"""What hashing returns: codes, errors, and gains as bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GAIN_MAX", "GAIN_OFFSET", "GAIN_ONE", "GAIN_UNIT", "Encoded", "gain_byte", "joined"]

# A gain byte b means the gain (b + GAIN_OFFSET) / GAIN_UNIT, from 0.5 to 4.48.
GAIN_OFFSET = 32
GAIN_UNIT = 64
GAIN_ONE = GAIN_UNIT - GAIN_OFFSET  # the byte of gain 1
GAIN_MAX = 255  # the largest byte


@dataclass(frozen=True)
class Encoded:
    """Keys as codes: `k ~ u P`, or `k - mean ~ u P`."""

    codes: Tensor  # int64 [..., N, W]
    error: Tensor  # float32 [..., N], |k - u P|, measured in the metric
    gain: Tensor  # uint8 [..., N], (gain + GAIN_OFFSET) / GAIN_UNIT ~ |k|^2 / <k, u P>, measured in the metric


def joined(blocks: Sequence[Encoded]) -> Encoded:
    """Return what hashing all keys returns, from what it returned for blocks of them in order."""
    if len(blocks) == 1:
        return blocks[0]
    return Encoded(
        codes=torch.cat([block.codes for block in blocks], -2),
        error=torch.cat([block.error for block in blocks], -1),
        gain=torch.cat([block.gain for block in blocks], -1),
    )


def gain_byte(squared_norm: Tensor, dot: Tensor) -> Tensor:
    """Return the gains of keys, uint8 `[..., N]`.

    Args:
        squared_norm: `[..., N]`, `|k|^2` in the metric.
        dot: `[..., N]`, `<k, u P>` in the metric.
    """
    byte = (GAIN_UNIT * squared_norm / dot - GAIN_OFFSET).round().clamp(0, GAIN_MAX)  # round() is half to even
    byte = torch.where(dot > 0, byte, GAIN_MAX)
    return torch.where(squared_norm > 0, byte, GAIN_ONE).to(torch.uint8)
