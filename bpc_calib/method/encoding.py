"""Hashing of keys with a fixed projection: codes of signs (Algorithm 2 of the paper in Gram form) or of nibbles."""

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codebook import Codebook, make_codebook
from bpc_calib.method.codes import pack_codes
from bpc_calib.method.encoded import Encoded, gain_byte, joined
from bpc_calib.method.nibbles import encode_nibbles

__all__ = ["encode", "encode_gram", "encode_with", "products"]

BLOCK = 2048  # keys at once: the search for nibbles keeps several kilobytes per key


def encode(keys: Tensor, projection: Tensor, *, metric: Tensor | None = None, mean: Tensor | None = None) -> Encoded:
    """Hash keys `[..., N, D]` with a projection `[..., H, D]`; leading dimensions broadcast.

    The greedy loop of Algorithm 2 (`u = sign(r v)`, `r -= u v` for each row `v` of `P`, from `r = k`)
    needs only the inner products `S = K P^T` and `T = P P^T` (docs/algorithm.md); with a metric, `S = K (P M)^T` and
    `T = P M P^T`. Products are computed in float32 (float64 for float64 keys). On CUDA, TF32 is harmless only for
    16-bit keys without mean and metric.

    Args:
        keys: any floating dtype.
        projection: is first rounded to the dtype of the keys.
        metric: `[..., D, D]`, the metric of the calibration of the projection; None is the identity.
        mean: `[..., D]`, is first subtracted from the keys; None is 0.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    if keys.dim() < 2 or projection.dim() < 2 or keys.shape[-1] != projection.shape[-1]:
        raise InputError(
            f"keys [..., N, D] and projection [..., H, D] do not fit: {list(keys.shape)} and {list(projection.shape)}"
        )
    return encode_with(make_codebook(projection, keys.dtype, metric=metric, mean=mean), keys)


def encode_with(codebook: Codebook, keys: Tensor) -> Encoded:
    """Do the same as `encode` with a prepared codebook, for keys `[..., N, D]` of its dtype.

    Raises:
        InputError: the keys have another `D` than the codebook.
    """
    with torch.autocast(keys.device.type, enabled=False):
        if not codebook.nibbles:
            return encode_gram(*products(codebook, keys))
        return joined([encode_nibbles(*products(codebook, block)) for block in keys.split(BLOCK, -2)])


def products(codebook: Codebook, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a search for codes needs: `S [..., N, R]`, `T [..., R, R]`, and the keys' squared norms `[..., N]`.

    Raises:
        InputError: the keys have another `D` than the codebook.
    """
    wide, in_metric = codebook.centre(keys)
    return wide @ codebook.matrix, codebook.gram, (wide * in_metric).sum(-1)


def encode_gram(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """Run the greedy pass over `S [..., N, H]`, `T [..., H, H]` and the squared norms of the keys `[..., N]`.

    Every sum runs in the order of the bits, so another implementation with the same order and dtype
    returns the same codes from the same `S` and `T`, bit for bit.
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
    squared_norm = squared_norm.expand(scores.shape[:-1])
    squared_error = squared_norm.clone()
    dot = torch.zeros_like(squared_error)  # <k, u P>
    falls = 2 * running.abs() - gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    for fall, part in zip(falls.unbind(-2), (signs * original).unbind(-2), strict=True):
        squared_error -= fall
        dot += part
    return Encoded(
        codes=pack_codes(signs.mT > 0),
        error=squared_error.clamp(min=0).double().sqrt().float(),  # torch misrounds float32 roots on CPU
        gain=gain_byte(squared_norm, dot),
    )
