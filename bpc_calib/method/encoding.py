"""Hashing of keys with a fixed projection: Algorithm 2 of the paper in Gram form, with error and gain."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.errors import InputError
from bpc_calib.method.codes import check_bits, pack_codes
from bpc_calib.method.encoded import Encoded, gain_byte

__all__ = ["Encoder", "encode", "encode_gram", "encode_with", "make_encoder", "projection_of"]


@dataclass(frozen=True, eq=False)
class Encoder:
    """What hashing needs from a projection, computed once for keys of one dtype: see `make_encoder`.

    All tensors are float32, or float64 for float64 keys.
    """

    matrix: Tensor  # [..., D, H], (P M)^T
    gram: Tensor  # [..., H, H], P M P^T
    metric: Tensor | None  # [..., D, D]
    mean: Tensor | None  # [..., D]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.matrix.shape[-1]

    def check(self, keys: Tensor) -> None:
        """Raise `InputError` unless this encoder can hash the keys `[..., N, D]`."""
        if self.matrix.shape[-2] != keys.shape[-1]:
            raise InputError(f"keys {list(keys.shape)} do not fit a projection of head_dim {self.matrix.shape[-2]}")

    def centre(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys `[..., N, D]` minus the mean, and the same times the metric, in the dtype of the encoder.

        Raises:
            InputError: the keys have another `D` than the encoder.
        """
        self.check(keys)
        wide = keys.to(self.matrix.dtype)
        if self.mean is not None:
            wide = wide - self.mean.unsqueeze(-2)
        return wide, wide if self.metric is None else wide @ self.metric

    def change(self, how: Callable[[Tensor], Tensor]) -> "Encoder":
        """Return a copy with `how` applied to every tensor `[B, H_KV, ...]`; `how` keeps the last two dimensions."""
        metric, mean = (None if tensor is None else how(tensor) for tensor in (self.metric, self.mean))
        return Encoder(how(self.matrix.mT).mT, how(self.gram), metric, mean)  # transposed, as it lies in memory


def make_encoder(
    projection: Tensor, dtype: torch.dtype, *, metric: Tensor | None = None, mean: Tensor | None = None
) -> Encoder:
    """Prepare a projection for keys of one dtype.

    `P` and `P M` are rounded to that dtype once. Every product uses the rounded matrices, and so does the
    projected query, so that codes of 16-bit keys follow the greedy loop as exactly as in float64.

    Args:
        projection: `[..., H, D]`.
        dtype: of the keys.
        metric, mean: as in `encode`.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check_bits(projection.shape[-2])
    dim = projection.shape[-1]
    if not dtype.is_floating_point:
        raise InputError(f"keys must be floating, not {dtype}")
    if metric is not None and metric.shape[-2:] != (dim, dim):
        raise InputError(f"metric must be [..., {dim}, {dim}], not {list(metric.shape)}")
    if mean is not None and mean.shape[-1:] != (dim,):
        raise InputError(f"mean must be [..., {dim}], not {list(mean.shape)}")
    exact = torch.promote_types(dtype, torch.float32)
    with torch.autocast(projection.device.type, enabled=False):
        rounded = projection.to(dtype).to(torch.float64)
        in_metric = rounded if metric is None else (rounded @ metric.to(torch.float64)).to(dtype).to(torch.float64)
        return Encoder(
            matrix=in_metric.mT.to(exact),
            gram=(rounded @ in_metric.mT).to(exact),
            metric=None if metric is None else metric.to(exact),
            mean=None if mean is None else mean.to(exact),
        )


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
    return encode_with(make_encoder(projection, keys.dtype, metric=metric, mean=mean), keys)


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """Do the same as `encode` with a prepared encoder, for keys `[..., N, D]` of its dtype.

    Raises:
        InputError: the keys have another `D` than the encoder.
    """
    with torch.autocast(keys.device.type, enabled=False):
        wide, in_metric = encoder.centre(keys)
        return encode_gram(wide @ encoder.matrix, encoder.gram, (wide * in_metric).sum(-1))


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


def projection_of(
    layer: LayerProjection, heads: slice, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Encoder]:
    """Return what projects queries and what hashes keys, for some KV heads of a layer.

    Args:
        layer: of an artifact.
        heads: which KV heads.
        dtype: of the keys and queries.
        device: where they are.
    """
    projection, metric, mean = (
        None if array is None else torch.from_numpy(array[heads].copy()).to(device)
        for array in (layer.projection, layer.metric, layer.mean)
    )
    assert projection is not None
    return projection.to(dtype), make_encoder(projection, dtype, metric=metric, mean=mean)
