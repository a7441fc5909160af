"""Fitting projections on a CPU: every head on a thread of its own, so that no thread waits for another."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from bpc_calib.backends.cpu.decompose import WORD, decompose_kernel
from bpc_calib.backends.cpu.language import WIDE
from bpc_calib.backends.cpu.layout import like
from bpc_calib.backends.cpu.least_squares import norm_kernel, products_kernel
from bpc_calib.backends.cpu.ready import make_ready
from bpc_calib.errors import InputError
from bpc_calib.method.decomposition import check_arguments, cholesky, draw, norms_by_bit
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.fitting import Fit, Products, refine

__all__ = ["fit"]

Array = NDArray[np.float64]


class _Head(NamedTuple):
    """What kernels read of one head; `dim` is a multiple of `WIDE`."""

    keys: Tensor  # [..., dim], contiguous: the keys without those of weight 0, then zeros to a multiple of `WORD`
    kept: int  # number of keys
    mean: Array  # [dim]
    metric: Array  # [dim, dim]
    root: Array  # [dim, dim], metric = root root^T


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
    make_ready(keys.dtype, "fit")
    lead, dim = keys.shape[:-2], keys.shape[-1]
    root = None if metric is None else cholesky(metric, keys)
    heads = _heads(keys, weights, mean, metric, root)
    if not all(head.keys.isfinite().all() for head in heads):
        raise InputError("keys hold NaN or infinity")
    draws = _whole(draw(bits, dim, generator))
    kept = torch.tensor([max(1, head.kept) for head in heads], dtype=torch.float64).view(lead)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        squared_norm = torch.tensor(list(pool.map(_squared_norm, heads)), dtype=torch.float64).view(lead)
        found = list(pool.map(lambda head: _decompose(head, draws, iterations), heads))
        in_root = torch.from_numpy(np.stack(found))[..., :dim].reshape(*lead, bits, dim)
        norms = norms_by_bit(squared_norm, in_root, kept)
        exact = in_root if root is None else torch.linalg.solve_triangular(root, in_root, upper=False, left=False)
        projection = exact.float()

        def products(projection: Tensor) -> Products:
            encoder = make_encoder(projection, torch.float64, metric=metric)
            matrices = _whole(encoder.matrix.mT).reshape(-1, bits, _padded(dim)).swapaxes(1, 2)
            grams = encoder.gram.reshape(-1, bits, bits).numpy()
            squares, cross = zip(*pool.map(_products, heads, matrices, grams), strict=True)
            return Products(
                torch.from_numpy(np.stack(squares)).view(*lead, bits, bits),
                torch.from_numpy(np.stack(cross))[..., :dim].reshape(*lead, bits, dim),
                squared_norm,
                encoder,
            )

        if rounds:
            projection, norms = refine(products, projection, rounds)
    return Fit(projection, norms, metric, mean)


def _padded(dim: int) -> int:
    return -(-dim // WIDE) * WIDE


def _whole(matrix: Tensor) -> Array:
    """As float64 with the last dimension filled up with zeros to a multiple of `WIDE`."""
    dim = matrix.shape[-1]
    return pad(matrix.to(torch.float64), (0, _padded(dim) - dim)).contiguous().numpy()


def _square(matrix: Tensor | None, lead: torch.Size, dim: int) -> Array:
    """Square matrices, one per head, filled up on both sides; None is the identity."""
    whole = torch.eye(dim) if matrix is None else matrix
    missing = _padded(dim) - dim
    whole = pad(whole.to(torch.float64), (0, missing, 0, missing)).expand(*lead, -1, -1)
    return whole.reshape(-1, dim + missing, dim + missing).contiguous().numpy()


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


def _arguments(head: _Head) -> tuple[Any, int, int, Array]:
    return like(head.keys), head.keys.data_ptr(), head.kept, head.mean


def _squared_norm(head: _Head) -> float:
    return float(norm_kernel(*_arguments(head), head.metric))


def _decompose(head: _Head, draws: Array, iterations: int) -> Array:
    projection = np.zeros_like(draws)
    if head.kept:
        decompose_kernel(*_arguments(head), head.root, draws, iterations, projection)
    return projection


def _products(head: _Head, matrix: Array, gram: Array) -> tuple[Array, Array]:
    dim, bits = matrix.shape
    squares, cross = np.zeros((bits, bits)), np.zeros((bits, dim))
    products_kernel(*_arguments(head), np.ascontiguousarray(matrix), gram, squares, cross)
    return squares, cross
