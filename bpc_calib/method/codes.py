"""Packing of binary codes: bit `i` is bit `i % 64` of word `i // 64`, 1 means +1, and unused upper bits are 0."""

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.numbers import check_bits

__all__ = ["check_codes", "default_bits", "pack", "pack_codes", "unpack", "unpack_codes"]


def default_bits(head_dim: int) -> int:
    """Return the code length for keys of this size: 64 bits for up to 128 dimensions, 128 for more."""
    return 64 if head_dim <= 128 else 128


def pack_codes(positive: Tensor) -> Tensor:
    """Pack bool `[..., N, H]`, True for +1, into int64 `[..., N, W]`, `W = ceil(H / 64)`."""
    return pack(positive.to(torch.int64), 1)


def pack(values: Tensor, width: int) -> Tensor:
    """Pack int64 `[..., N, n]` of so many bits each into words, int64 `[..., N, W]`, the first into the lowest bits."""
    words = []
    for word in values.split(64 // width, dim=-1):
        # A shift by 63 sets the sign bit, and the sum of distinct bits is their bitwise OR.
        shifts = width * torch.arange(word.shape[-1], device=word.device)
        words.append((word << shifts).sum(-1))
    return torch.stack(words, dim=-1)


def unpack(codes: Tensor, bits: int, width: int) -> Tensor:
    """Unpack codes of `bits` bits, int64 `[..., N, W]`, into int64 `[..., N, bits / width]` of `width` bits each.

    Raises:
        InputError: the codes are not int64 of that many bits.
    """
    check_codes(codes, bits)
    shifts = torch.arange(0, min(bits, 64), width, device=codes.device)
    return ((codes.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).flatten(-2)


def check_codes(codes: Tensor, bits: int) -> None:
    """Raise `InputError` unless `codes` are int64 `[..., N, W]` and `bits` is a supported code length."""
    check_bits(bits)
    if codes.dtype != torch.int64 or codes.shape[-1] != -(-bits // 64):
        raise InputError(
            f"codes of {bits} bits must be int64 [..., N, {-(-bits // 64)}], not {codes.dtype} {list(codes.shape)}"
        )


def unpack_codes(codes: Tensor, bits: int) -> Tensor:
    """Unpack int64 `[..., N, W]` into float32 `[..., N, bits]` of -1 and +1."""
    return unpack(codes, bits, 1).to(torch.float32).mul_(2).sub_(1)
