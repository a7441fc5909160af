"""Product codes: every byte of a code names one of 256 vectors, its centroids, in a part of a rotated space.

Jegou, Douze and Schmid, "Product quantization for nearest neighbor search", 2011. The space is that of the query
metric, and each part has as many of its dimensions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_artifacts.schema import CENTROIDS
from bpc_calib.errors import InputError
from bpc_calib.method.codes import check_bits
from bpc_calib.method.encoded import Encoded, gain_byte

__all__ = [
    "CENTROIDS",
    "Product",
    "ProductEncoder",
    "Projection",
    "by_dimension",
    "code_bits",
    "encode_parts",
    "encode_product",
    "make_product_encoder",
    "pack_bytes",
    "unpack_bytes",
]

AT_ONCE = 1 << 24  # products of keys and centroids


@dataclass(frozen=True, eq=False)
class Product:
    """What product codes stand for: `k - mean ~ [c_1 ... c_m] W`, with one centroid per part."""

    rows: Tensor  # [..., D, D], W
    centroids: Tensor  # [..., m, 256, D / m]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.centroids.shape[-3]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of both tensors."""
        return self.rows.dtype

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions of both tensors."""
        return self.rows.shape[:-2]

    def to(self, dtype: torch.dtype) -> "Product":
        """Return the same rounded to another dtype; the numbers of a dimension of all centroids lie together."""
        return Product(self.rows.to(dtype), by_dimension(self.centroids.to(dtype)))


Projection = Tensor | Product  # signs: [..., H, D]


def code_bits(projection: Projection) -> int:
    """Return the bits of the codes of a projection."""
    return projection.bits if isinstance(projection, Product) else projection.shape[-2]


@dataclass(frozen=True, eq=False)
class ProductEncoder:
    """What hashing needs of a `Product`, computed once for keys of one dtype: see `make_product_encoder`.

    All tensors are float32, or float64 for float64 keys.
    """

    matrix: Tensor  # [..., D, D], the inverse of W: it takes keys into the space of the centroids
    centroids: Tensor  # [..., m, 256, D / m]
    halves: Tensor  # [..., m, 256], half the squared length of each centroid
    mean: Tensor | None  # [..., D]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.centroids.shape[-3]

    def check(self, keys: Tensor) -> None:
        """Raise `InputError` unless this encoder can hash the keys `[..., N, D]`."""
        if self.matrix.shape[-2] != keys.shape[-1]:
            raise InputError(f"keys {list(keys.shape)} do not fit a projection of head_dim {self.matrix.shape[-2]}")

    def rotate(self, keys: Tensor) -> Tensor:
        """Return the keys `[..., N, D]` less the mean, in the space of the centroids."""
        self.check(keys)
        wide = keys.to(self.matrix.dtype)
        return (wide if self.mean is None else wide - self.mean.unsqueeze(-2)) @ self.matrix

    def change(self, how: Callable[[Tensor], Tensor]) -> "ProductEncoder":
        """Return a copy with `how`, which keeps the last two dimensions, applied to every tensor."""
        mean = None if self.mean is None else how(self.mean)
        return ProductEncoder(how(self.matrix), by_dimension(how(self.centroids)), how(self.halves), mean)


def by_dimension(centroids: Tensor) -> Tensor:
    """Let the 256 numbers of a dimension lie one after the other, as hashing reads them."""
    return centroids.mT.contiguous().mT


def make_product_encoder(product: Product, dtype: torch.dtype, *, mean: Tensor | None = None) -> ProductEncoder:
    """Prepare product codes for keys of one dtype, in which W and the centroids are rounded once.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    rows, centroids = product.rows, product.centroids
    check_bits(product.bits)
    dim = rows.shape[-1]
    if not dtype.is_floating_point:
        raise InputError(f"keys must be floating, not {dtype}")
    wanted = (centroids.shape[-3], CENTROIDS, dim // centroids.shape[-3])
    if rows.shape[-2] != dim or dim % centroids.shape[-3] or centroids.shape[-3:] != wanted:
        raise InputError(f"rows {list(rows.shape)} and centroids {list(centroids.shape)} of product codes do not fit")
    if mean is not None and mean.shape[-1:] != (dim,):
        raise InputError(f"mean must be [..., {dim}], not {list(mean.shape)}")
    exact = torch.promote_types(dtype, torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        rounded = centroids.to(dtype).to(torch.float64)
        return ProductEncoder(
            # On the CPU, so that every device has the same matrix.
            matrix=torch.linalg.inv(rows.to(dtype).to("cpu", torch.float64)).to(rows.device, exact),
            centroids=by_dimension(rounded.to(exact)),
            halves=(rounded.square().sum(-1) / 2).to(exact),
            mean=None if mean is None else mean.to(exact),
        )


def encode_product(encoder: ProductEncoder, keys: Tensor) -> Encoded:
    """Hash keys `[..., N, D]` of the dtype of the encoder; `Encoded.error` is measured in the query metric."""
    with torch.autocast(keys.device.type, enabled=False):
        return encode_parts(encoder.rotate(keys), encoder.centroids, encoder.halves)


def encode_parts(rotated: Tensor, centroids: Tensor, halves: Tensor) -> Encoded:
    """Find the nearest centroid of every part, the one of the lowest number where several are.

    Every sum runs in the order of the dimensions, each product and each sum rounded, so another implementation with
    the same order and dtype returns the same codes for the same keys, bit for bit.

    Args:
        rotated: `[..., N, D]`, as `ProductEncoder.rotate` returns it.
        centroids, halves: those of the encoder; leading dimensions broadcast.
    """
    parts, _, width = centroids.shape[-3:]
    split = rotated.unflatten(-1, (parts, width)).transpose(-3, -2)  # [..., m, N, D / m]
    block = max(1, AT_ONCE * rotated.shape[-2] // max(1, rotated.numel() // rotated.shape[-1] * parts * CENTROIDS))
    found = [_nearest(some, centroids, halves) for some in split.split(block, dim=-2)]
    best, place = (torch.cat(each, dim=-1) for each in zip(*found, strict=True))  # [..., m, N]
    half = halves.expand(*place.shape[:-1], CENTROIDS).gather(-1, place)
    squared_norm = torch.zeros_like(rotated[..., 0])
    for number in rotated.unbind(-1):
        squared_norm = squared_norm + number * number
    squared_error, dot = squared_norm, torch.zeros_like(squared_norm)  # of the rest, and <k, code>
    for gained, own in zip(best.unbind(-2), half.unbind(-2), strict=True):
        squared_error = squared_error - 2 * gained
        dot = dot + (gained + own)
    return Encoded(
        codes=pack_bytes(place.transpose(-2, -1)),
        error=squared_error.clamp(min=0).double().sqrt().float(),  # torch misrounds float32 roots on CPU
        gain=gain_byte(squared_norm, dot),
    )


def _nearest(split: Tensor, centroids: Tensor, halves: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest `<z, c> - |c|^2 / 2` of keys `[..., m, N, D / m]`, and which centroid has it."""
    scores = (-halves).unsqueeze(-2)
    for number, along in zip(split.unbind(-1), centroids.unbind(-1), strict=True):
        scores = scores + number.unsqueeze(-1) * along.unsqueeze(-2)
    place = scores.argmax(-1, keepdim=True)
    return scores.gather(-1, place).squeeze(-1), place.squeeze(-1)


def pack_bytes(places: Tensor) -> Tensor:
    """Pack integers below 256, `[..., N, m]`, into int64 `[..., N, W]`: part `j` is byte `j % 8` of word `j // 8`."""
    words = []
    for word in places.split(8, dim=-1):
        shifts = 8 * torch.arange(word.shape[-1], device=places.device)
        words.append((word.to(torch.int64) << shifts).sum(-1))  # the bytes do not overlap: the sum is their OR
    return torch.stack(words, dim=-1)


def unpack_bytes(codes: Tensor, parts: int) -> Tensor:
    """Unpack int64 `[..., N, W]` into int64 `[..., N, parts]` below 256."""
    shifts = 8 * torch.arange(8, device=codes.device)
    return ((codes.unsqueeze(-1) >> shifts) & 255).flatten(-2)[..., :parts]
