"""Packing of binary codes: bit `i` is bit `i % 64` of word `i // 64`, 1 means +1, and unused upper bits are 0."""

import torch
from torch import Tensor

from bpc_artifacts.schema import BITS
from bpc_calib.errors import InputError

__all__ = ["check_bits", "check_codes", "default_bits", "pack_codes", "unpack_codes"]


def check_bits(bits: int) -> None:
    """Raise `InputError` unless `bits` is a supported code length."""
    if not isinstance(bits, int) or bits not in BITS:
        raise InputError(f"bits must be 32, 64 or 128, not {bits}")


def default_bits(head_dim: int) -> int:
    """Return the code length for keys of this size: 64 bits for up to 128 dimensions, 128 for more."""
    return 64 if head_dim <= 128 else 128


def pack_codes(positive: Tensor) -> Tensor:
    """Pack bool `[..., N, H]`, True for +1, into int64 `[..., N, W]`, `W = ceil(H / 64)`."""
    words = []
    for word in positive.split(64, dim=-1):
        # A shift by 63 sets the sign bit, and the sum of distinct powers of two is their bitwise OR.
        shifts = torch.arange(word.shape[-1], device=word.device)
        words.append((word.to(torch.int64) << shifts).sum(-1))
    return torch.stack(words, dim=-1)


def check_codes(codes: Tensor, bits: int) -> None:
    """Raise `InputError` unless `codes` are int64 `[..., N, W]` and `bits` is a supported code length."""
    check_bits(bits)
    if codes.dtype != torch.int64 or codes.shape[-1] != -(-bits // 64):
        raise InputError(
            f"codes of {bits} bits must be int64 [..., N, {-(-bits // 64)}], not {codes.dtype} {list(codes.shape)}"
        )


def unpack_codes(codes: Tensor, bits: int) -> Tensor:
    """Unpack int64 `[..., N, W]` into float32 `[..., N, bits]` of -1 and +1."""
    check_codes(codes, bits)
    shifts = torch.arange(min(bits, 64), device=codes.device)
    ones = (codes.unsqueeze(-1) >> shifts) & 1
    return ones.flatten(-2).to(torch.float32).mul_(2).sub_(1)
