"""Fitting projections on a CPU: every head on a thread of its own, so that no thread waits for another."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bpc_calib.backends.cpu.native import ELEMENTS, library
from bpc_calib.errors import InputError
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.decomposition import check_arguments, cholesky, draw, norms_by_bit
from bpc_calib.method.fitting import Fit, Products, refine

__all__ = ["WORD", "fit"]

WIDE, WORD = 16, 64  # as in native/fit.h


class _Head(NamedTuple):
    """What kernels read of one head, all contiguous; `dim` is a multiple of `WIDE`."""

    keys: Tensor  # [..., dim]: the keys without those of weight 0, then zeros to a multiple of `WORD`
    kept: int  # number of keys
    mean: Tensor  # float64 [dim]
    metric: Tensor  # [dim, dim]
    root: Tensor  # [dim, dim], metric = root root^T


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
    """`bpc_calib.method.fitting.fit`, for keys of 16 or 32 bits."""
    check_arguments(keys, weights, bits, iterations, mean)
    lead, dim = keys.shape[:-2], keys.shape[-1]
    root = None if metric is None else cholesky(metric, keys)
    heads = _heads(keys, weights, mean, metric, root)
    if not all(head.keys.isfinite().all() for head in heads):
        raise InputError("keys hold NaN or infinity")
    draws = _whole(draw(bits, dim, generator))
    kept = torch.tensor([max(1, head.kept) for head in heads], dtype=torch.float64).view(lead)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        squared_norm = torch.tensor(list(pool.map(_squared_norm, heads)), dtype=torch.float64).view(lead)
        found = torch.stack(list(pool.map(lambda head: _decompose(head, draws, iterations), heads)))
        in_root = found[..., :dim].reshape(*lead, bits, dim)
        norms = norms_by_bit(squared_norm, in_root, kept)
        exact = in_root if root is None else torch.linalg.solve_triangular(root, in_root, upper=False, left=False)
        projection = exact.float()

        def products(projection: Tensor) -> Products:
            codebook = make_codebook(projection, torch.float64, metric=metric)
            matrices = _whole(codebook.matrix.mT).mT.reshape(-1, _padded(dim), bits)
            grams = codebook.gram.reshape(-1, bits, bits)
            squares, cross = zip(*pool.map(_products, heads, matrices, grams), strict=True)
            return Products(
                torch.stack(squares).view(*lead, bits, bits),
                torch.stack(cross)[..., :dim].reshape(*lead, bits, dim),
                squared_norm,
                codebook,
            )

        if rounds:
            projection, norms = refine(products, projection, rounds)
    return Fit(projection, norms, metric, mean)


def _padded(dim: int) -> int:
    return -(-dim // WIDE) * WIDE


def _whole(matrix: Tensor) -> Tensor:
    """As float64 with the last dimension filled up with zeros to a multiple of `WIDE`."""
    dim = matrix.shape[-1]
    return pad(matrix.to(torch.float64), (0, _padded(dim) - dim)).contiguous()


def _square(matrix: Tensor | None, lead: torch.Size, dim: int) -> Tensor:
    """Square matrices, one per head, filled up on both sides; None is the identity."""
    whole = torch.eye(dim) if matrix is None else matrix
    missing = _padded(dim) - dim
    whole = pad(whole.to(torch.float64), (0, missing, 0, missing)).expand(*lead, -1, -1)
    return whole.reshape(-1, dim + missing, dim + missing).contiguous()


def _heads(
    keys: Tensor, weights: Tensor | None, mean: Tensor | None, metric: Tensor | None, root: Tensor | None
) -> list[_Head]:
    count, dim = keys.shape[-2:]
    lead = keys.shape[:-2]
    means = _whole(keys.new_zeros(*lead, dim) if mean is None else mean).reshape(-1, _padded(dim))
    metrics, roots = _square(metric, lead, dim), _square(root, lead, dim)
    flat = keys.reshape(-1, count, dim)
    masks = None if weights is None else weights.reshape(-1, count) > 0
    heads = []
    for i, rows in enumerate(flat):
        used = rows if masks is None else rows[masks[i]]
        filled = pad(used, (0, _padded(dim) - dim, 0, -len(used) % WORD)).contiguous()
        heads.append(_Head(filled, len(used), means[i], metrics[i], roots[i]))
    return heads


def _arguments(head: _Head) -> tuple[int, ...]:
    return ELEMENTS[head.keys.dtype], head.keys.data_ptr(), head.kept, head.keys.shape[-1], head.mean.data_ptr()


def _squared_norm(head: _Head) -> float:
    return float(library().bpc_squared_norm(*_arguments(head), head.metric.data_ptr()))


def _decompose(head: _Head, draws: Tensor, iterations: int) -> Tensor:
    projection = torch.zeros_like(draws)
    if head.kept:
        library().bpc_decompose(
            *_arguments(head), head.root.data_ptr(), draws.data_ptr(), len(draws), iterations, projection.data_ptr()
        )
    return projection


def _products(head: _Head, matrix: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    dim, bits = matrix.shape
    squares, cross = matrix.new_empty(bits, bits), matrix.new_empty(bits, dim)
    matrix, gram = matrix.contiguous(), gram.contiguous()
    library().bpc_products(
        *_arguments(head), matrix.data_ptr(), gram.data_ptr(), bits, squares.data_ptr(), cross.data_ptr()
    )
    return squares, cross
