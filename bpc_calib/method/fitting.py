"""Fit a projection to keys: centring, binary principal components in a metric, rounds of least squares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codebook import Codebook, make_codebook
from bpc_calib.method.decomposition import BLOCK, check_keys, decompose
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.float32 import float64_is_slow, proven_codes, sum_by_signs

__all__ = ["Fit", "Products", "fit", "least_squares", "mean_key", "refine", "residual_norms"]

RIDGE = 1e-6  # share of the number of keys, because bits that are always equal make the equations singular


@dataclass(frozen=True)
class Fit:
    """The result of `fit`: `K - mean ~ U P` in a metric."""

    projection: Tensor  # float32 [..., H, D]
    residual_norms: Tensor  # float64 [..., H + 1], |K - mean - U P|_F after 0..H bits, measured in the metric
    metric: Tensor | None  # float32 [..., D, D], the argument of `fit`
    mean: Tensor | None  # float32 [..., D], the argument of `fit`


def fit(
    keys: Tensor,
    bits: int = 64,
    *,
    iterations: int = 8,
    rounds: int = 0,
    metric: Tensor | None = None,
    mean: Tensor | None = None,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Fit:
    """Find the projection for the codes of these keys.

    With `iterations=1` and every other default, this is Algorithm 1 of the paper.

    Args:
        keys: `[..., N, D]`, any floating dtype.
        bits: code length `H`: 32, 64 or 128.
        iterations: iterations per bit, see `decompose`.
        rounds: rounds of least squares, see `least_squares`.
        metric: `[..., D, D]`, see `query_metric`; None is the identity.
        mean: float32 `[..., D]`, is first subtracted from every key, such as the mean of some keys; None is 0.
        weights: `[..., N]` of 0 and 1; a key of weight 0 is ignored.
        generator: generator for the draws of `decompose`.

    Raises:
        InputError: the shapes, dtypes or values do not fit.
    """
    check_keys(keys, weights, mean)
    metric = None if metric is None else metric.to(keys.device)
    if mean is not None:
        keys = keys.to(torch.float64) - mean.unsqueeze(-2)
    found = decompose(keys, bits, iterations=iterations, metric=metric, weights=weights, generator=generator)
    projection, residual_norms = found.projection, found.residual_norms
    if rounds:
        projection, residual_norms = least_squares(keys, projection, rounds, metric=metric, weights=weights)
    return Fit(projection, residual_norms, metric, mean)


def least_squares(
    keys: Tensor, projection: Tensor, rounds: int, *, metric: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Alternate `U = encode(K; P)` and `P = argmin |K - U P|`, and return the best `P` of all rounds.

    The least-squares `P` is the same in every metric. The greedy `encode` may do worse with the new `P` than with
    the previous one, so a round may raise the residual; the result is never worse than the first `P`.

    Args:
        keys: `[..., N, D]`.
        projection: float32 `[..., H, D]`, the first `P`.
        rounds: number of rounds.
        metric, weights: as in `fit`.

    Returns:
        The projection, float32, and its residual norms, float64 `[..., H + 1]`, as in `Fit`.
    """
    return refine(_sums(keys, metric, weights), projection, rounds)


@dataclass(frozen=True)
class Products:
    """What a round of least squares needs of the keys and their codes `U`; all float64."""

    squares: Tensor  # [..., R, R], U^T U
    cross: Tensor  # [..., R, D], U^T K
    squared_norm: Tensor  # [...], |K|^2 in the metric
    codebook: Codebook

    @property
    def residual_norms(self) -> Tensor:
        """`|K - U P|` after 0..R rows of the projection, `[..., R + 1]`."""
        gained = (self.cross * self.codebook.matrix.mT).sum(-1).cumsum(-1)
        spent = (self.squares * self.codebook.gram).cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
        norm = self.squared_norm.unsqueeze(-1)
        return torch.cat([norm, norm - 2 * gained + spent], dim=-1).clamp(min=0).sqrt()


def refine(products: Callable[[Tensor], Products], projection: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Run the rounds of `least_squares`, and return what it returns.

    Args:
        products: hashes the keys with a projection, float32 `[..., R, D]`.
        projection: float32 `[..., R, D]`, the first one.
        rounds: number of rounds.
    """
    found = products(projection)
    best, best_norms = projection, found.residual_norms
    for _ in range(rounds):
        squares = found.squares
        count = squares.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=1)[..., None, None]
        ridge = RIDGE * count * torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
        projection = torch.linalg.solve(squares + ridge, found.cross).float()
        found = products(projection)
        norms = found.residual_norms
        better = norms[..., -1:] < best_norms[..., -1:]
        best = torch.where(better.unsqueeze(-1), projection, best)
        best_norms = torch.where(better, norms, best_norms)
    return best, best_norms


def residual_norms(
    keys: Tensor, projection: Tensor, *, metric: Tensor | None = None, mean: Tensor | None = None
) -> Tensor:
    """Measure a projection on keys that it was not fitted to: the norms of `Fit`, with the codes of `encode`.

    Args:
        keys: `[..., N, D]`, any floating dtype.
        projection: float32 `[..., H, D]`.
        metric: `[..., D, D]` of the fit; None is the identity.
        mean: float32 `[..., D]` of the fit; None is 0.

    Returns:
        `|K - mean - U P|_F` after 0..H bits in the metric, float64 `[..., H + 1]`.

    Raises:
        InputError: the shapes, dtypes or values do not fit, or a key is not finite.
    """
    check_keys(keys, mean=mean)
    if not keys.isfinite().all():
        raise InputError("keys hold NaN or infinity")
    if mean is not None:
        keys = keys.to(torch.float64) - mean.unsqueeze(-2)
    return _sums(keys, metric, None)(projection).residual_norms


def _sums(keys: Tensor, metric: Tensor | None, weights: Tensor | None) -> Callable[[Tensor], Products]:
    """Return the function from a projection to the products of its codes with these keys."""
    squared_norm, single = _squared_norm(keys, metric, weights), float64_is_slow(keys.device)

    def products(projection: Tensor) -> Products:
        codebook = make_codebook(projection, torch.float64, metric=metric)
        return _products(keys, codebook, weights, squared_norm, single=single)

    return products


def _products(
    keys: Tensor, codebook: Codebook, weights: Tensor | None, squared_norm: Tensor, *, single: bool
) -> Products:
    """Sum over blocks of keys in order; `single`: with float32 products that give the sums of float64."""
    squares = cross = torch.zeros((), dtype=torch.float64, device=keys.device)
    for block, weight in _blocks(keys, weights):
        codes = proven_codes(codebook, block) if single else encode_with(codebook, block).codes
        signs = codebook.used(codes)
        if weight is not None:
            signs = signs * weight.float()
        squares = squares + (signs.mT @ signs).to(torch.float64)  # exact: at most BLOCK in absolute value
        cross = cross + (sum_by_signs(signs, block) if single else signs.to(torch.float64).mT @ block)
    return Products(squares, cross, squared_norm, codebook)


def _squared_norm(keys: Tensor, metric: Tensor | None, weights: Tensor | None) -> Tensor:
    """Return the sum of squared norms in the metric, float64 `[...]`."""
    total = torch.zeros((), dtype=torch.float64, device=keys.device)
    for block, _ in _blocks(keys, weights):
        in_metric = block if metric is None else block @ metric.to(torch.float64)
        total = total + (block * in_metric).sum(-2).sum(-1)  # one sum over both dimensions would depend on the threads
    return total


def mean_key(keys: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of the keys of weight 1, float32 `[..., D]`."""
    total = torch.zeros((), dtype=torch.float64, device=keys.device)
    for block, _ in _blocks(keys, weights):
        total = total + block.sum(-2)
    count = keys.shape[-2] if weights is None else weights.to(torch.float64).sum(-1, keepdim=True).clamp(min=1)
    return (total / count).float()


def _blocks(keys: Tensor, weights: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield blocks of keys in float64, 0 where their weight is 0, and their weights `[..., n, 1]`."""
    for start in range(0, keys.shape[-2], BLOCK):
        block = keys[..., start : start + BLOCK, :].to(torch.float64)
        if weights is None:
            yield block, None
        else:
            weight = weights[..., start : start + BLOCK, None].to(torch.float64)
            yield torch.where(weight > 0, block, 0.0), weight
