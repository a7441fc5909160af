"""Exact attention of one new token over the chosen tokens of the cache."""

import torch
from torch import Tensor

from bpc_calib.errors import InputError

__all__ = ["check", "sparse_attention"]


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scaling: float | None = None
) -> Tensor:
    """Compute softmax attention of the `G` queries of each KV head over the tokens in `indices` only.

    Args:
        query: `[..., G, D]`.
        keys: `[..., N, D]`.
        values: the same shape as the keys.
        indices: int64 `[..., k]`, one list per KV head, as `select` returns it; -1 is no token.
        scaling: factor on the products q k; None: `D ** -0.5`.

    Returns:
        `[..., G, D]` in the query's dtype.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check(query, keys, values, indices)
    rows = indices.clamp(min=0).unsqueeze(-1).expand(*indices.shape, keys.shape[-1])
    none = indices < 0
    mask = ~none.unsqueeze(-2) if none.any() else None
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys.gather(-2, rows), values.gather(-2, rows), attn_mask=mask, scale=scaling
    )


def check(query: Tensor, keys: Tensor, values: Tensor, indices: Tensor) -> None:
    """Raise `InputError` unless `sparse_attention` accepts the arguments.

    Args:
        query, keys, values, indices: as in `sparse_attention`.
    """
    alike = keys.shape == values.shape and query.dtype == keys.dtype == values.dtype
    fit = alike and query.shape[-1:] == keys.shape[-1:]
    if not fit or not query.shape[:-2] == keys.shape[:-2] == indices.shape[:-1]:
        raise InputError(
            "query [..., G, D], keys and values [..., N, D] and indices [..., k] do not fit: "
            f"{list(query.shape)} {query.dtype}, {list(keys.shape)} {keys.dtype}, {list(values.shape)} {values.dtype} "
            f"and {list(indices.shape)}"
        )
