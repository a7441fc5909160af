"""Fit the vectors of nibbles to keys: residual k-means for a start, then rounds of least squares.

A round encodes the keys and takes the vectors that are best for these codes, all at once (Martinez et al., "LSQ++:
Lower running time and higher recall in multi-codebook quantization", 2018).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codebook import Codebook, make_codebook
from bpc_calib.method.decomposition import check_keys, cholesky
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.fitting import Fit, Products
from bpc_calib.method.nibbles import NIBBLE
from bpc_calib.method.numbers import check_bits

__all__ = ["fit_nibbles", "nibble_residuals"]

BLOCK = 4096  # keys whose sums are exact or nearly so in float32; sums of blocks are float64
START_KEYS = 8192  # of k-means, which need only find a start
PULL = 0.01  # towards the former vectors, as so many times the keys: codes leave sums of vectors undetermined

Encode = Callable[[Codebook, Tensor], Encoded]


def fit_nibbles(
    keys: Tensor,
    bits: int = 64,
    *,
    iterations: int = 6,
    rounds: int = 8,
    metric: Tensor | None = None,
    mean: Tensor | None = None,
    seed: int = 0,
    encode: Encode = encode_with,
) -> Fit:
    """Find the vectors of nibbles for these keys.

    Args:
        keys: `[H, N, D]`, any floating dtype.
        bits: code length: 32, 64 or 128, four per nibble.
        iterations: of k-means, for each nibble.
        rounds: of least squares.
        metric: `[H, D, D]`, errors are measured in it (`query_metric`); None is the identity.
        mean: float32 `[H, D]`, is first subtracted from every key; None is 0.
        seed: of the keys with which k-means begin, the same ones for each head.
        encode: `encode_with` of a backend.

    Returns:
        The projection float32 `[H, 4 bits, D]`, 16 vectors for each nibble, and the residual norms, float64
        `[H, bits / 4 + 1]`, after 0 to all nibbles.

    Raises:
        InputError: the shapes, dtypes or values do not fit, or a key is not finite.
    """
    check_bits(bits)
    check_keys(keys, mean=mean)
    if not keys.isfinite().all():
        raise InputError("keys hold NaN or infinity")
    metric = None if metric is None else metric.to(keys.device)
    centred = _centred(keys, mean)
    root = None if metric is None else cholesky(metric, keys).float()
    vectors = _residual_k_means(centred[:, :: -(-keys.shape[1] // START_KEYS)], root, bits // 4, iterations, seed)
    found = _products(centred, vectors, metric, encode)
    for _ in range(rounds):
        vectors = _least_squares(found, vectors)
        found = _products(centred, vectors, metric, encode)
    return Fit(vectors, found.residual_norms[..., ::NIBBLE], metric, mean)


def nibble_residuals(
    keys: Tensor,
    projection: Tensor,
    *,
    metric: Tensor | None = None,
    mean: Tensor | None = None,
    encode: Encode = encode_with,
) -> Tensor:
    """Measure vectors of nibbles on keys that they were not fitted to: the residual norms of `fit_nibbles`."""
    return _products(_centred(keys, mean), projection, metric, encode).residual_norms[..., ::NIBBLE]


def _centred(keys: Tensor, mean: Tensor | None) -> Tensor:
    return keys.float() if mean is None else keys.float() - mean.unsqueeze(-2)


def _residual_k_means(keys: Tensor, root: Tensor | None, nibbles: int, iterations: int, seed: int) -> Tensor:
    """Return vectors `[H, 16 * nibbles, D]`: those of a nibble are the 16 means of what the former ones leave.

    Args:
        keys: float32 `[H, N, D]`, centred.
        root: float32 `[H, D, D]`, `metric = root root^T`.
        nibbles, iterations, seed: as in `fit_nibbles`.
    """
    left = keys if root is None else keys @ root
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(nibbles):
        chosen = torch.randperm(left.shape[1], generator=generator)[:NIBBLE].to(left.device)
        means = left[:, chosen.sort().values]
        means = torch.nn.functional.pad(means, (0, 0, 0, NIBBLE - means.shape[1]))
        for _ in range(iterations):
            one_hot = _nearest(left, means)
            count = one_hot.sum(1).unsqueeze(-1)
            means = torch.where(count > 0, (one_hot.mT @ left) / count.clamp(min=1), means)
        left = left - _nearest(left, means) @ means
        found.append(means)
    vectors = torch.cat(found, 1)
    if root is None:
        return vectors
    return torch.linalg.solve_triangular(root.double(), vectors.double(), upper=False, left=False).float()


def _least_squares(found: Products, vectors: Tensor) -> Tensor:
    """Return the best vectors for the codes, or those nearest to `vectors [H, R, D]` where several are as good.

    The order of the nibbles stays, from large vectors to small ones, as the search for codes needs it.
    """
    count = found.squares.diagonal(dim1=-2, dim2=-1).sum(-1) / (vectors.shape[-2] // NIBBLE)
    pull = PULL * count[:, None, None].expand(-1, vectors.shape[-2], 1)
    with _one_thread():
        root = torch.linalg.cholesky(found.squares + torch.diag_embed(pull[..., 0]))
        return torch.cholesky_solve(found.cross + pull * vectors.double(), root).float()


@contextmanager
def _one_thread() -> Iterator[None]:
    """So that the number of threads of a CPU changes no bit: LAPACK divides large matrices among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _nearest(points: Tensor, means: Tensor) -> Tensor:
    """Return which mean is nearest to each point, one-hot float32 `[H, N, 16]`."""
    nearest = ((means * means).sum(-1).unsqueeze(-2) - 2 * points @ means.mT).argmin(-1, keepdim=True)
    return torch.zeros(*points.shape[:-1], NIBBLE, device=points.device).scatter_(-1, nearest, 1.0)


def _products(keys: Tensor, vectors: Tensor, metric: Tensor | None, encode: Encode) -> Products:
    """Sum what a round of least squares needs over blocks of keys, in order; `U` is one-hot for each nibble."""
    codebook = make_codebook(vectors, torch.float32, metric=metric, nibbles=True)
    squares = cross = squared_norm = torch.zeros((), dtype=torch.float64, device=keys.device)
    for block in keys.split(BLOCK, 1):
        codes = encode(codebook, block.unsqueeze(0)).codes[0]
        one_hot = codebook.used(codes)
        squares = squares + (one_hot.mT @ one_hot).double()  # exact
        cross = cross + (one_hot.mT @ block).double()
        along = block if metric is None else block @ metric
        squared_norm = squared_norm + (block.double() * along.double()).sum(-2).sum(-1)
    return Products(squares, cross, squared_norm, codebook)
