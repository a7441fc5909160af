"""What codes stand for: the rows that a code adds up, and the matrices that hash keys with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.errors import InputError
from bpc_calib.method.codes import unpack_codes
from bpc_calib.method.metric import adapted
from bpc_calib.method.nibbles import named, unpack_nibbles
from bpc_calib.method.numbers import check_bits

__all__ = ["Codebook", "check_rows", "codebook_of", "make_codebook"]


@dataclass(frozen=True, eq=False)
class Codebook:
    """A projection and what follows from it, for keys of one dtype: see `make_codebook`.

    It has `R` rows. A code of `H` signs adds all `R = H` of them, each plus or minus; one of `H / 4` nibbles adds one
    of 16 for each nibble, of `R = 4 H`.

    Leading dimensions are those of the KV heads, `[H_KV]`, or of sequences and KV heads, `[B, H_KV]`. All tensors but
    the projection are float32, or float64 for float64 keys.
    """

    projection: Tensor  # [..., R, D], in the dtype of the keys
    matrix: Tensor  # [..., D, R], (P M)^T
    gram: Tensor  # [..., R, R], P M P^T
    metric: Tensor | None  # [..., D, D]
    mean: Tensor | None  # [..., D]
    nibbles: bool = False  # codes are nibbles instead of signs

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.matrix.shape[-1] // (4 if self.nibbles else 1)

    @property
    def by_sequence(self) -> bool:
        """Whether every sequence has its own."""
        return self.gram.dim() == 4

    @property
    def words(self) -> int:
        """The 64-bit words of a code."""
        return -(-self.bits // 64)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as they lie in memory: the matrix is transposed."""
        found = {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}
        return found | {"matrix": self.matrix.mT}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], *, nibbles: bool = False) -> "Codebook":
        """Return the codebook whose `tensors` these are; others may be among them."""
        found = {field.name: tensors.get(field.name) for field in fields(cls) if field.name != "nibbles"}
        return cls(**found | {"matrix": tensors["matrix"].mT}, nibbles=nibbles)  # type: ignore[arg-type]

    def check(self, keys: Tensor) -> None:
        """Raise `InputError` unless this codebook can hash the keys `[..., N, D]`."""
        if self.matrix.shape[-2] != keys.shape[-1]:
            raise InputError(f"keys {list(keys.shape)} do not fit a projection of head_dim {self.matrix.shape[-2]}")

    def centre(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys `[..., N, D]` minus the mean, and the same times the metric, in the dtype of the matrices.

        Raises:
            InputError: the keys have another `D` than the codebook.
        """
        self.check(keys)
        wide = keys.to(self.matrix.dtype)
        if self.mean is not None:
            wide = wide - self.mean.unsqueeze(-2)
        return wide, wide if self.metric is None else wide @ self.metric

    def used(self, codes: Tensor) -> Tensor:
        """Return the factor, -1, 0 or 1, of each row in codes `[..., N, W]`: `U`, float32 `[..., N, R]`."""
        if not self.nibbles:
            return unpack_codes(codes, self.bits)
        names = named(unpack_nibbles(codes, self.bits))
        return torch.zeros(*names.shape[:-1], self.matrix.shape[-1], device=codes.device).scatter_(-1, names, 1.0)

    def change(self, how: Callable[[Tensor], Tensor]) -> "Codebook":
        """Return a copy with `how` applied to every tensor `[B, H_KV, ...]`; `how` keeps the last two dimensions."""
        metric, mean = (None if tensor is None else how(tensor) for tensor in (self.metric, self.mean))
        matrix = how(self.matrix.mT).mT  # transposed, as it lies in memory
        return Codebook(how(self.projection), matrix, how(self.gram), metric, mean, self.nibbles)

    @torch.inference_mode()
    def refill(self, other: "Codebook") -> None:
        """Copy the numbers of a codebook of the same shapes: CUDA graphs read the tensors where they are."""
        for name, old in vars(self).items():
            if isinstance(old, Tensor):
                old.copy_(getattr(other, name))


def make_codebook(
    projection: Tensor,
    dtype: torch.dtype,
    *,
    metric: Tensor | None = None,
    mean: Tensor | None = None,
    nibbles: bool = False,
) -> Codebook:
    """Prepare a projection for keys of one dtype.

    `P` and `P M` are rounded to that dtype once. Every product uses the rounded matrices, and so does the
    projected query, so that codes of 16-bit keys follow the greedy loop as exactly as in float64.

    Args:
        projection: `[..., R, D]`.
        dtype: of the keys.
        metric: `[..., D, D]`, the metric of the calibration of the projection; None is the identity.
        mean: `[..., D]`, is first subtracted from the keys; None is 0.
        nibbles: the rows are the vectors of nibbles, 16 of each.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check_rows(projection, nibbles)
    dim = projection.shape[-1]
    if not dtype.is_floating_point:
        raise InputError(f"keys must be floating, not {dtype}")
    if metric is not None and metric.shape[-2:] != (dim, dim):
        raise InputError(f"metric must be [..., {dim}, {dim}], not {list(metric.shape)}")
    if mean is not None and mean.shape[-1:] != (dim,):
        raise InputError(f"mean must be [..., {dim}], not {list(mean.shape)}")
    exact = torch.promote_types(dtype, torch.float32)
    with torch.autocast(projection.device.type, enabled=False):
        of_queries = projection.to(dtype)
        rounded = of_queries.to(torch.float64)
        in_metric = rounded if metric is None else (rounded @ metric.to(torch.float64)).to(dtype).to(torch.float64)
        return Codebook(
            projection=of_queries,
            matrix=in_metric.mT.to(exact),
            gram=(rounded @ in_metric.mT).to(exact),
            metric=None if metric is None else metric.to(exact),
            mean=None if mean is None else mean.to(exact),
            nibbles=nibbles,
        )


def check_rows(projection: Tensor, nibbles: bool) -> None:
    """Raise `InputError` unless a projection `[..., R, D]` has the rows of codes of a supported length."""
    rows = projection.shape[-2]
    if nibbles and rows % 4:
        raise InputError(f"vectors of nibbles must be [..., 16 * nibbles, D], not {list(projection.shape)}")
    check_bits(rows // 4 if nibbles else rows)


def codebook_of(
    layer: LayerProjection,
    heads: slice,
    dtype: torch.dtype,
    device: torch.device,
    prompt_metric: Tensor | None = None,
) -> Codebook:
    """Return the codebook of some KV heads of a layer of an artifact.

    Args:
        layer: of an artifact.
        heads: which KV heads.
        dtype: of the keys and queries.
        device: where they are.
        prompt_metric: float32 `[B, H_KV, D, D]`, counts as much as the layer's own metric, which must be there
            (docs/algorithm.md); None: the layer's own alone.
    """
    projection, metric, mean = (
        None if array is None else torch.from_numpy(array[heads].copy()).to(device)
        for array in (layer.projection, layer.metric, layer.mean)
    )
    assert projection is not None
    if prompt_metric is not None:
        assert metric is not None
        metric = adapted(metric, prompt_metric.to(device))
        projection, mean = (
            None if each is None else each.expand(len(metric), *each.shape).contiguous() for each in (projection, mean)
        )
        assert projection is not None
    return make_codebook(projection, dtype, metric=metric, mean=mean, nibbles=layer.nibbles)
