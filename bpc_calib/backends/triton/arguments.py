"""A tensor and its strides as one argument of a kernel."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Strided", "strided", "tight"]


class Strided(NamedTuple):
    """A tensor `[B, H_KV, N, ...]` and its first three strides; in a kernel `at` is a pointer."""

    at: Tensor | None
    b: int
    h: int
    n: int


def strided(tensor: Tensor | None) -> Strided:
    """For a launch; without a tensor, `at` is None."""
    return Strided(None, 0, 0, 0) if tensor is None else Strided(tensor, *tensor.stride()[:3])


def tight(tensor: Tensor) -> Tensor:
    """With a contiguous last dimension, which all kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
