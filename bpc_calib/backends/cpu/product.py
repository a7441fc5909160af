"""The calls of the kernels for product codes."""

from typing import Any

import torch
from torch import Tensor

from bpc_calib.backends.cpu.layout import rows_of
from bpc_calib.backends.cpu.nearest import parts_kernel
from bpc_calib.backends.cpu.threads import run
from bpc_calib.method import product
from bpc_calib.method.encoded import Encoded

__all__ = ["empty", "encode_parts"]


def encode_parts(rotated: Tensor, centroids: Tensor, halves: Tensor) -> Encoded:
    """`bpc_calib.method.product.encode_parts` for float32."""
    if rotated.dtype != torch.float32 or not rotated.numel():
        return product.encode_parts(rotated, centroids, halves)
    lead, (tokens, dim) = rotated.shape[:-2], rotated.shape[-2:]
    parts, rotated = centroids.shape[-3], rotated.contiguous()
    along, each_half = rows_of(centroids.mT, lead, 3), rows_of(halves, lead, 2)
    found = empty(lead, tokens, 8 * parts)
    run(
        parts_kernel, rotated.data_ptr(), lead.numel(), tokens, dim, parts, _addresses(along), _addresses(each_half),
        found.codes.data_ptr(), found.error.data_ptr(), found.gain.data_ptr(),
    )  # fmt: skip
    return found


def empty(lead: torch.Size, tokens: int, bits: int) -> Encoded:
    """Room for the codes of keys `[*lead, tokens, D]`."""
    return Encoded(
        codes=torch.empty(*lead, tokens, -(-bits // 64), dtype=torch.int64),
        error=torch.empty(*lead, tokens, dtype=torch.float32),
        gain=torch.empty(*lead, tokens, dtype=torch.uint8),
    )


def _addresses(rows: Tensor) -> Any:
    """Where each row lies, int64."""
    return (rows.data_ptr() + rows.element_size() * rows.stride(0) * torch.arange(len(rows))).numpy()
