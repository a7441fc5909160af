"""Binary principal components of a set of keys: Algorithm 1 of the paper, with refinement."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bpc_calib.errors import InputError
from bpc_calib.method.codes import pack_codes
from bpc_calib.method.numbers import check_bits

__all__ = [
    "Decomposition", "check_arguments", "check_keys", "check_metric", "cholesky", "decompose", "draw", "norms_by_bit",
]  # fmt: skip

# Keys per block. Blocks are summed in order: the block size decides the rounding, so it is part of the method.
BLOCK = 4096


@dataclass(frozen=True)
class Decomposition:
    """The result of `decompose`: `K ~ U P`."""

    projection: Tensor  # float32 [..., H, D], the rows of P
    codes: Tensor  # int64 [..., N, W], the rows of U; all bits 0 for a key of weight 0
    residual_norms: Tensor  # float64 [..., H + 1], |R|_F after 0..H bits, measured in the metric


def decompose(
    keys: Tensor,
    bits: int = 64,
    *,
    iterations: int = 8,
    metric: Tensor | None = None,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Decomposition:
    """Find a `P` that makes `|K - U P|_F` small with codes `U` in {-1, +1}, one bit after another.

    For each bit: draw `v ~ N(0, I)`, then `iterations` times `u = sign(R v)`, `v = u R / N`; subtract
    `u^T v` from the residual `R`, which starts as `K`. `iterations=1` is Algorithm 1 of "Training-Free
    Hashing-Based Attention via Binary Principal Components" as printed; more iterations never raise the
    residual of a bit (docs/algorithm.md). With a metric, `<a, b> = a M b^T` replaces the dot product of
    keys, in the residual too.

    Everything is computed in float64 and `v` is summed over fixed blocks of keys in order, so the
    result does not depend on the number of threads. The CPU draws once per bit and all leading dimensions
    share the draw: a batch returns the same as its members one by one.

    Args:
        keys: `[..., N, D]`, any floating dtype, any device with float64.
        bits: code length `H`: 32, 64 or 128.
        iterations: iterations per bit, at least 1.
        metric: symmetric positive definite `[..., D, D]` (`query_metric`); None is the identity, as in the paper.
        weights: `[..., N]` of 0 and 1; a key of weight 0 (padding) is ignored, whatever its values.
        generator: a CPU generator for the draws; None uses a new one with seed 0.

    Raises:
        InputError: the shapes, dtypes or values do not fit, or a key is not finite.
    """
    check_arguments(keys, weights, bits, iterations)
    count, dim = keys.shape[-2:]
    residual = keys.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    if weights is None:
        weights = residual.new_ones(keys.shape[:-1])
    weights = weights.to(torch.float64)
    residual[weights == 0] = 0
    if not residual.isfinite().all():
        raise InputError("keys hold NaN or infinity")
    root = None if metric is None else cholesky(metric, keys)
    if root is not None:
        residual = residual @ root  # M = L L^T: the dot product of rows of K L is the metric product of rows of K
    kept = weights.sum(-1).clamp(min=1)

    draws = draw(bits, dim, generator).to(keys.device)
    if count > BLOCK:
        residual = pad(residual, (0, 0, 0, -count % BLOCK))
        weights = pad(weights, (0, -count % BLOCK))
    blocks = residual.unflatten(-2, (-1, min(count, BLOCK)))  # a view: [..., blocks, BLOCK, D]
    weights = weights.unflatten(-1, (-1, min(count, BLOCK)))

    projection = residual.new_empty(*keys.shape[:-2], bits, dim)
    positive = torch.empty(*keys.shape[:-1], bits, dtype=torch.bool, device=keys.device)
    squared_norm = _in_order(blocks.square().sum(-2)).sum(-1)
    for bit in range(bits):
        v = draws[bit].expand(*keys.shape[:-2], dim)
        for _ in range(iterations):
            signs, total = _sign_and_sum(blocks, weights, v)
            v = total / kept.unsqueeze(-1)
        blocks.addcmul_(signs.unsqueeze(-1), v[..., None, None, :], value=-1)
        projection[..., bit, :] = v
        positive[..., bit] = signs.flatten(-2)[..., :count] > 0
    norms = norms_by_bit(squared_norm, projection, kept)
    if root is not None:
        projection = torch.linalg.solve_triangular(root, projection, upper=False, left=False)
    return Decomposition(
        projection=projection.float(),
        codes=pack_codes(positive),
        residual_norms=norms,
    )


def draw(bits: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw the first direction of each bit, float64 `[bits, dim]`, on the CPU; None is a new generator with seed 0."""
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    return torch.randn(bits, dim, dtype=torch.float64, generator=generator)


def norms_by_bit(squared_norm: Tensor, projection: Tensor, kept: Tensor) -> Tensor:
    """Return `|R|` after 0..H bits, float64 `[..., H + 1]`.

    Args:
        squared_norm: `|K|^2` before the first bit, `[...]`.
        projection: `v` of each bit, float64 `[..., H, D]`, in the space of `K L`.
        kept: number of keys, `[...]`.
    """
    after = [squared_norm]
    for v in projection.unbind(-2):
        after.append(after[-1] - kept * v.square().sum(-1))  # |R - u^T v|^2 = |R|^2 - N |v|^2, because v = u R / N
    return torch.stack(after, dim=-1).clamp(min=0).sqrt()


def check_arguments(
    keys: Tensor, weights: Tensor | None, bits: int, iterations: int, mean: Tensor | None = None
) -> None:
    """Raise `InputError` unless the arguments of `decompose` fit, and the mean of `fit`.

    Args:
        keys: `[..., N, D]`.
        weights: `[..., N]`; None: all keys count.
        bits: code length.
        iterations: iterations per bit.
        mean: `[..., D]`.
    """
    check_bits(bits)
    check_keys(keys, weights, mean)
    if iterations < 1:
        raise InputError(f"iterations must be at least 1, not {iterations}")


def check_keys(keys: Tensor, weights: Tensor | None = None, mean: Tensor | None = None) -> None:
    """Raise `InputError` unless keys are floating `[..., N, D]`, weights are 0 or 1 per key, and a mean `[..., D]`."""
    if keys.dim() < 2 or not keys.dtype.is_floating_point or 0 in keys.shape:
        raise InputError(f"keys must be floating [..., N, D], not {keys.dtype} {list(keys.shape)}")
    if weights is not None and (weights.shape != keys.shape[:-1] or not ((weights == 0) | (weights == 1)).all()):
        raise InputError(f"weights must be 0 or 1, of shape {list(keys.shape[:-1])}")
    if mean is not None and mean.shape != (expected := (*keys.shape[:-2], keys.shape[-1])):
        raise InputError(f"mean must be of shape {list(expected)}, not {list(mean.shape)}")


def check_metric(metric: Tensor, keys: Tensor) -> None:
    """Raise `InputError` unless the metric is `[D, D]` or `[..., D, D]` for keys `[..., N, D]`."""
    dim = keys.shape[-1]
    if metric.shape[-2:] != (dim, dim) or metric.shape[:-2] not in ((), keys.shape[:-2]):
        raise InputError(f"metric [..., D, D] and keys [..., N, D] do not fit: {[*metric.shape]} and {[*keys.shape]}")


def cholesky(metric: Tensor, keys: Tensor) -> Tensor:
    """Return `L` with `M = L L^T` in float64, on the device of the keys `[..., N, D]`.

    Raises:
        InputError: the metric does not fit the keys, or is not positive definite.
    """
    check_metric(metric, keys)
    root, failed = torch.linalg.cholesky_ex(metric.to(keys.device, torch.float64))
    if failed.any() or not root.isfinite().all():
        raise InputError("metric must be positive definite")
    return root


def _sign_and_sum(blocks: Tensor, weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return `u = sign(R v)`, float64 `[..., blocks, BLOCK]`, 0 at weight 0, and `u R`, float64 `[..., D]`."""
    product = (blocks @ v[..., None, :, None]).squeeze(-1)
    signs = torch.where(product >= 0, 1.0, -1.0) * weights
    parts = (signs.unsqueeze(-2) @ blocks).squeeze(-2)  # [..., blocks, D]
    return signs, _in_order(parts)


def _in_order(parts: Tensor) -> Tensor:
    """Sum over dimension -2, first to last, so that the rounding is the same on every device."""
    total = parts[..., 0, :]
    for part in parts.unbind(-2)[1:]:
        total = total + part
    return total
