"""Least squares where float64 is slow, as on most GPUs: float32 products whose results are those of float64.

Signs follow float32 products where a bound on their rounding proves them, and float64 for the few other keys. Sums of
keys are exact: keys are cut into slices of so few bits that a float32 sum of `BLOCK` of them does not round (the idea
of Ozaki et al., "Error-free transformations of matrix multiplication by using fast routines of matrix multiplication
and its applications", 2012).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bpc_calib.method.codebook import Codebook
from bpc_calib.method.codes import pack_codes
from bpc_calib.method.encoding import encode_with

__all__ = ["float64_is_slow", "proven_codes", "sum_by_signs"]

FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}  # the data center GPUs of NVIDIA
UNIT = 2.0**-24  # the relative rounding error of float32
SLICE = 11  # bits: TF32 holds them, and 4,096 such numbers sum to at most 23 bits
SLICES = 4  # so every key is cut at 2^-43 of the largest or below


def float64_is_slow(device: torch.device) -> bool:
    """True for GPUs of NVIDIA that compute float64 at 1/32 or less of the rate of float32."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) not in FAST_FLOAT64


def proven_codes(codebook: Codebook, keys: Tensor) -> Tensor:
    """Return the codes of `encode_with`, int64 `[..., N, W]`, for float64 keys `[..., N, D]`.

    Args:
        codebook: float64, without mean; leading dimensions as those of the keys.
        keys: float64, centred.
    """
    dim, bits = codebook.matrix.shape[-2:]
    with _full_float32():
        running = (keys.float() @ codebook.matrix.float()).mT.contiguous()  # [..., H, N]
    gram = codebook.gram.float()
    # A bound on the error of `running[j]`: of the product, then of at most H subtractions of Gram entries.
    length = keys.norm(dim=-1) * (1 + UNIT)
    columns = codebook.matrix.norm(dim=-2)
    spent = codebook.gram.abs().sum(-2)
    steps = bits + 3
    of_length = (1.01 * UNIT * (dim + 3 + steps) * columns).float()
    constant = (1.01 * UNIT * steps * spent).float()
    length = length.float()
    doubtful = torch.zeros(keys.shape[:-1], dtype=torch.bool, device=keys.device)
    positive = torch.empty(*keys.shape[:-1], bits, dtype=torch.bool, device=keys.device)
    one = running.new_tensor(1.0)
    for i in range(bits):
        row = running[..., i, :]
        doubtful |= row.abs() <= of_length[..., i, None] * length + constant[..., i, None]
        positive[..., i] = row >= 0
        u = torch.where(row >= 0, one, -one).unsqueeze(-2)
        running[..., i + 1 :, :].addcmul_(u, gram[..., i, i + 1 :, None], value=-1)
    codes = pack_codes(positive)
    for place in doubtful.any(-1).nonzero().tolist():
        head = tuple(place)
        metric = None if codebook.metric is None else codebook.metric[head]
        exact = Codebook(codebook.projection[head], codebook.matrix[head], codebook.gram[head], metric, None)
        codes[head][doubtful[head]] = encode_with(exact, keys[head][doubtful[head]]).codes
    return codes


def sum_by_signs(signs: Tensor, keys: Tensor) -> Tensor:
    """Return `signs^T keys`, float64 `[..., H, D]`, from float32 products that do not round.

    Args:
        signs: `[..., N, H]` of -1, 0 and 1, at most 4,096 of them.
        keys: float64 `[..., N, D]`.
    """
    single = signs.float().mT
    exponent = torch.frexp(keys.abs().amax((-2, -1), keepdim=True))[1]  # every key is below 2^exponent
    rest, total = keys, torch.zeros((), dtype=torch.float64, device=keys.device)
    for part in range(1, SLICES + 1):
        unit = torch.ldexp(torch.ones_like(keys[..., :1, :1]), exponent - SLICE * part)
        whole = (rest / unit).trunc()
        total = total + (single @ whole.float()).to(torch.float64) * unit
        rest = rest - whole * unit
    return total


@contextmanager
def _full_float32() -> Iterator[None]:
    """Without TF32, which has 11 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
