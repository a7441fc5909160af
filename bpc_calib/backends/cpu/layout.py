"""How a tensor lies in memory, in the terms of the kernels: the type of its elements, its address, its strides."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bpc_calib.backends.cpu.language import BFLOAT16, FLOAT16, FLOAT32
from bpc_calib.method.encoding import Encoder

__all__ = ["ELEMENTS", "EMPTY", "LIKE", "address", "encoder_fields", "like", "rows_of", "strides"]

LIKE = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}
EMPTY = {dtype: np.empty(0, kind) for dtype, kind in LIKE.items()}
ELEMENTS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


def like(tensor: Tensor) -> Any:
    """The empty array by which a kernel knows the type of the elements."""
    return EMPTY[tensor.dtype]


def address(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0 stands for one that is not given."""
    return 0 if tensor is None else tensor.data_ptr()


def strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    """The first `count` strides in elements; 0 for a tensor that is not given."""
    return (0,) * count if tensor is None else tensor.stride()[:count]


def rows_of(tensor: Tensor, lead: torch.Size, rank: int) -> Tensor:
    """`[rows, ...]` of a tensor that may be one for several rows, each row contiguous."""
    if tensor.dim() == rank + 1 and tensor.shape[0] == lead.numel() and tensor.is_contiguous():
        return tensor  # of one sequence, as most often
    shape = tensor.shape[-rank:]
    rows = tensor.expand(*lead, *shape).reshape(-1, *shape)  # one for all has stride 0 here
    return rows if rows[:1].is_contiguous() else rows.contiguous()


def encoder_fields(encoder: Encoder, lead: torch.Size) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """The fields of a `Hashing` from `matrix` to `mean_stride`, and the tensors that lie there, by `rows_of`."""
    metric = None if encoder.metric is None else rows_of(encoder.metric, lead, 2)
    mean = None if encoder.mean is None else rows_of(encoder.mean, lead, 1)
    tensors = (rows_of(encoder.matrix.mT, lead, 2), rows_of(encoder.gram, lead, 2), metric, mean)
    return tuple(number for each in tensors for number in (address(each), strides(each, 1)[0])), tensors
