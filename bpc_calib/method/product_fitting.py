"""Fit product codes to keys: a rotation that gives every part as much to describe, then k-means in every part.

The rotation is the parametric one of Ge, He, Ke and Sun, "Optimized product quantization", 2013: principal components,
dealt out so that the products of the variances of all parts are alike. To turn it further along with the centroids
changed nothing (docs/projections.md).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codes import check_bits
from bpc_calib.method.decomposition import BLOCK, check_keys, check_metric
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.fitting import Fit
from bpc_calib.method.product import CENTROIDS, Product, by_dimension, encode_parts, make_product_encoder, unpack_bytes

__all__ = ["ROUNDS", "check_parts", "fit_product", "product_residual_norms"]

ROUNDS = 16  # of k-means
FINE = 1 << 30  # numbers of keys are summed as integers of at most this size, in any order with the same result

Encode = Callable[[Tensor, Tensor, Tensor], Encoded]


def check_parts(bits: int, dim: int) -> None:
    """Raise `InputError` unless keys of `dim` numbers can have product codes of so many bits."""
    check_bits(bits)
    if dim % (bits // 8):
        raise InputError(f"product codes of {bits} bits need a head_dim that is a multiple of {bits // 8}, not {dim}")


def fit_product(
    keys: Tensor,
    bits: int,
    *,
    metric: Tensor | None = None,
    mean: Tensor | None = None,
    generator: torch.Generator | None = None,
    encode: Encode = encode_parts,
) -> Fit:
    """Find product codes for these keys; `Fit.metric` is None, as `Fit.projection`, W, contains the metric.

    Args:
        keys: `[..., N, D]`, any floating dtype.
        bits: of a code, 8 per part.
        metric: `[..., D, D]`, see `query_metric`; None is the identity.
        mean: float32 `[..., D]`, is first subtracted from every key, such as the mean of some keys; None is 0.
        generator: draws the keys that k-means begins with.
        encode: `encode_parts`, or the same from a backend.

    Raises:
        InputError: the shapes, dtypes or values do not fit, or there are fewer than 256 keys.
    """
    check_keys(keys, mean=mean)
    (count, dim), lead = keys.shape[-2:], keys.shape[:-2]
    check_parts(bits, dim)
    if count < CENTROIDS:
        raise InputError(f"product codes need at least {CENTROIDS} keys, not {count}")
    if not keys.isfinite().all():
        raise InputError("keys hold NaN or infinity")
    if metric is not None:
        check_metric(metric, keys)
    first = torch.randperm(count, generator=generator)[:CENTROIDS].to(keys.device)
    means = None if mean is None else mean.reshape(-1, dim)
    metrics = None if metric is None else metric.to(keys.device).expand(*lead, dim, dim).reshape(-1, dim, dim)
    found = [
        _fit(
            head.to(torch.float64) - (0 if means is None else means[i].to(torch.float64)),
            None if metrics is None else metrics[i],
            bits // 8,
            first,
            encode,
        )
        for i, head in enumerate(keys.reshape(-1, count, dim))
    ]
    rows, centroids, norms = (torch.stack(each).unflatten(0, lead or (1,)) for each in zip(*found, strict=True))
    if not lead:
        rows, centroids, norms = rows[0], centroids[0], norms[0]
    return Fit(rows, norms, None, mean, centroids)


def product_residual_norms(
    keys: Tensor, product: Product, *, mean: Tensor | None = None, encode: Encode = encode_parts
) -> Tensor:
    """Measure product codes on other keys: the residual norms of `Fit` after 0..m parts, float64 `[..., m + 1]`.

    Args:
        keys: `[..., N, D]`, any floating dtype.
        product: of a fit.
        mean: float32 `[..., D]` of the fit; None is 0.
        encode: `encode_parts`, or the same from a backend.

    Raises:
        InputError: the shapes, dtypes or values do not fit, or a key is not finite.
    """
    check_keys(keys, mean=mean)
    if not keys.isfinite().all():
        raise InputError("keys hold NaN or infinity")
    encoder = make_product_encoder(product, torch.float32, mean=mean)
    rotated = encoder.rotate(keys)
    place = unpack_bytes(encode(rotated, encoder.centroids, encoder.halves).codes, product.bits // 8)
    return _norms(rotated, encoder.centroids, place)


def _fit(
    keys: Tensor, metric: Tensor | None, parts: int, first: Tensor, encode: Encode
) -> tuple[Tensor, Tensor, Tensor]:
    """W, the centroids and the residual norms of the keys of one head, float64 `[N, D]`."""
    dim = keys.shape[-1]
    root, inverse = _roots(metric, dim, keys.device)
    moment = torch.zeros(dim, dim, dtype=torch.float64, device=keys.device)
    for block in keys.split(BLOCK):
        moment = moment + block.mT @ block
    variances, vectors = torch.linalg.eigh((root @ moment @ root).cpu())
    turn = vectors[:, _dealt_out(variances.tolist(), parts)].to(keys.device)
    rotated = torch.cat([block @ (root @ turn) for block in keys.split(BLOCK)]).float()  # [N, D]
    unit = rotated.abs().amax().double().clamp(min=torch.finfo(torch.float32).tiny) / FINE
    counted = (rotated.double() / unit).round().long().unflatten(-1, (parts, -1)).transpose(0, 1)  # [m, N, D / m]
    centroids = rotated[first].unflatten(-1, (parts, -1)).transpose(0, 1).contiguous()
    for _ in range(ROUNDS):
        place = _places(rotated, centroids, encode)
        centroids = _means(counted, unit, place, centroids)
    return (turn.mT @ inverse).float(), centroids, _norms(rotated, centroids, _places(rotated, centroids, encode))


def _roots(metric: Tensor | None, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The symmetric root of a metric, and its inverse, float64."""
    if metric is None:
        same = torch.eye(dim, dtype=torch.float64, device=device)
        return same, same
    values, vectors = torch.linalg.eigh(metric.to("cpu", torch.float64))
    values = values.clamp(min=torch.finfo(torch.float32).eps).sqrt()
    return ((vectors * values) @ vectors.mT).to(device), ((vectors / values) @ vectors.mT).to(device)


def _dealt_out(variances: list[float], parts: int) -> list[int]:
    """The dimensions part by part: in order of variance, each goes to the part with room and the least product."""
    room = len(variances) // parts
    least = max(variances) * 1e-12 or 1.0
    held: list[list[int]] = [[] for _ in range(parts)]
    sums = [0.0] * parts  # logarithms, above that of the least variance, so that every dimension adds something
    for place in sorted(range(len(variances)), key=lambda place: -variances[place]):
        part = min((j for j in range(parts) if len(held[j]) < room), key=lambda j: sums[j])
        held[part].append(place)
        sums[part] += math.log(max(variances[place], least) / least)
    return [place for part in held for place in part]


def _places(rotated: Tensor, centroids: Tensor, encode: Encode) -> Tensor:
    halves = (centroids.double().square().sum(-1) / 2).float()
    return unpack_bytes(encode(rotated, by_dimension(centroids), halves).codes, len(centroids))


def _means(counted: Tensor, unit: Tensor, place: Tensor, before: Tensor) -> Tensor:
    """The mean of the keys of every centroid; a centroid without keys takes one of those that are coded worst."""
    index = place.mT.contiguous()  # [m, N]
    sums = torch.zeros(before.shape, dtype=torch.int64, device=before.device)
    sums.scatter_add_(1, index.unsqueeze(-1).expand_as(counted), counted)
    number = torch.zeros(before.shape[:2], dtype=torch.int64, device=before.device)
    number.scatter_add_(1, index, torch.ones_like(index))
    means = (sums.double() * unit / number.clamp(min=1).unsqueeze(-1)).float()
    for part in (number == 0).any(-1).nonzero().flatten().tolist():
        empty = (number[part] == 0).nonzero().flatten()
        keys = (counted[part].double() * unit).float()
        error = (keys - means[part][index[part]]).square().sum(-1)
        worst = error.sort(descending=True, stable=True).indices[: len(empty)]
        means[part, empty] = keys[worst]
    return means


def _norms(rotated: Tensor, centroids: Tensor, place: Tensor) -> Tensor:
    """Residual norms after 0..m parts, float64 `[..., m + 1]`, of keys `[..., N, D]` with centroids `[..., N, m]`."""
    parts, _, width = centroids.shape[-3:]
    split = rotated.unflatten(-1, (parts, width)).transpose(-3, -2)  # [..., m, N, D / m]
    named = centroids.gather(-2, place.mT.unsqueeze(-1).expand(split.shape))
    whole = split.double().square().sum((-2, -1))
    left = (split - named).double().square().sum((-2, -1))
    none = torch.zeros_like(whole[..., :1])
    squared = torch.cat([none, left.cumsum(-1)], -1) + torch.cat([whole.flip(-1).cumsum(-1).flip(-1), none], -1)
    return squared.clamp(min=0).sqrt()
