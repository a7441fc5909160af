"""Exact attention of one new token over all tokens in use of a buffer with spare room."""

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.choosing import within

__all__ = ["check", "dense_attention"]


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scaling: float | None = None,
    *,
    valid: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention of the `G` queries of each KV head over the tokens in use.

    Args:
        query: `[B, H_KV, G, D]`.
        keys: `[B, H_KV, N, D]`; finite in the unused part too.
        values: the same shape as the keys; finite in the unused part too.
        lengths: integers `[B]`, the number of tokens in use; later entries are ignored.
        scaling: factor on the products q k; None: `D ** -0.5`.
        valid: bool `[B, N]`; False is padding. None: no padding.

    Returns:
        `[B, H_KV, G, D]` in the query's dtype.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check(query, keys, values, lengths, valid)
    seen = within(lengths, keys.shape[2], valid)[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling)


def check(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, valid: Tensor | None) -> None:
    """Raise `InputError` unless `dense_attention` accepts the arguments.

    Args:
        query, keys, values, lengths, valid: as in `dense_attention`.
    """
    alike = keys.shape == values.shape and query.dtype == keys.dtype == values.dtype
    fit = query.dim() == keys.dim() == 4 and alike
    if not fit or query.shape[:2] != keys.shape[:2] or query.shape[-1] != keys.shape[-1]:
        raise InputError(
            "query [B, H_KV, G, D] and keys and values [B, H_KV, N, D] do not fit: "
            f"{list(query.shape)} {query.dtype}, {list(keys.shape)} {keys.dtype} and {list(values.shape)}"
        )
    if lengths.shape != keys.shape[:1] or lengths.dtype.is_floating_point:
        raise InputError(f"lengths {lengths.dtype} {list(lengths.shape)} do not fit keys {list(keys.shape)}")
    if valid is not None and (valid.shape != (keys.shape[0], keys.shape[2]) or valid.dtype != torch.bool):
        raise InputError(f"valid {valid.dtype} {list(valid.shape)} does not fit keys {list(keys.shape)}")
