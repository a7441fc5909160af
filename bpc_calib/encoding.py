"""Hashing of keys under a fixed projection: Algorithm 2 of the paper in Gram form, with error and gain."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.codes import check_bits, pack_codes
from bpc_calib.errors import InputError

__all__ = ["GAIN_ONE", "Encoded", "encode", "encode_gram"]

# A gain byte b stands for (b + 32) / 64, so 0.5 to 4.48; this one stands for 1.
GAIN_ONE = 32
GAIN_MAX = 255


@dataclass(frozen=True)
class Encoded:
    """Keys as codes: `k ~ u P`."""

    codes: Tensor  # int64 [..., N, W]
    error: Tensor  # float32 [..., N], |k - u P|
    gain: Tensor  # uint8 [..., N], (gain + 32) / 64 ~ |k|^2 / <k, u P>


def encode(keys: Tensor, projection: Tensor) -> Encoded:
    """Hash keys `[..., N, D]` under a projection `[..., H, D]`; leading dimensions broadcast.

    The greedy loop of Algorithm 2 (`u = sign(r v)`, `r -= u v` for each row `v` of `P`, from `r = k`)
    needs only the inner products `S = K P^T` and `T = P P^T` (docs/algorithm.md). `P` is rounded once
    to the keys' dtype, and the same rounded `P` serves both products; the products themselves are
    taken in float32 (float64 for float64 keys). On CUDA, TF32 is harmless for 16-bit keys only.

    Raises:
        InputError: shapes or dtypes that do not fit.
    """
    if keys.dim() < 2 or projection.dim() < 2 or keys.shape[-1] != projection.shape[-1]:
        raise InputError(
            f"keys [..., N, D] and projection [..., H, D] do not fit: {list(keys.shape)} and {list(projection.shape)}"
        )
    if not keys.dtype.is_floating_point:
        raise InputError(f"keys must be floating, not {keys.dtype}")
    check_bits(projection.shape[-2])
    exact = torch.promote_types(keys.dtype, torch.float32)
    rounded = projection.to(keys.dtype).to(torch.float64)
    with torch.autocast(keys.device.type, enabled=False):
        gram = (rounded @ rounded.mT).to(exact)
        wide = keys.to(exact)
        return encode_gram(wide @ rounded.to(exact).mT, gram, wide.square().sum(-1))


def encode_gram(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """The greedy pass over `S [..., N, H]`, `T [..., H, H]` and `|k|^2 [..., N]`.

    Every sum is taken in the order of the bits, so another implementation that does the same in the
    same dtype gets the same codes from the same `S` and `T`, bit for bit.
    """
    bits = scores.shape[-1]
    original = scores.mT
    running = original.clone(memory_format=torch.contiguous_format)  # row i is final once bits 0 to i - 1 are known
    signs = torch.empty_like(running)
    one, minus_one = running.new_tensor(1.0), running.new_tensor(-1.0)
    for i in range(bits):
        u = torch.where(running[..., i : i + 1, :] >= 0, one, minus_one)  # sign(0) = +1
        signs[..., i : i + 1, :] = u
        running[..., i + 1 :, :].addcmul_(u, gram[..., i, i + 1 :, None], value=-1)
    squared_error = squared_norm.clone()
    dot = torch.zeros_like(squared_norm)  # <k, u P>
    falls = 2 * running.abs() - gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    for fall, part in zip(falls.unbind(-2), (signs * original).unbind(-2), strict=True):
        squared_error -= fall
        dot += part
    return Encoded(
        codes=pack_codes(signs.mT > 0),
        error=squared_error.clamp(min=0).sqrt().float(),
        gain=_gain_byte(squared_norm, dot),
    )


def _gain_byte(squared_norm: Tensor, dot: Tensor) -> Tensor:
    byte = (64 * squared_norm / dot - 32).round().clamp(0, GAIN_MAX)  # round() is half to even
    byte = torch.where(dot > 0, byte, GAIN_MAX)
    return torch.where(squared_norm > 0, byte, GAIN_ONE).to(torch.uint8)
