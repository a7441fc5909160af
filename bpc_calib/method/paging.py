"""Codes, keys and values in pages, as inference servers keep them: the plain torch form.

A page has room for `size` tokens of every KV head. The table of a sequence lists its pages in order, and the slot of a
token is `page * size + place`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.encoding import Encoded

__all__ = ["CodePages", "check_indices", "check_table", "read_codes", "read_tokens", "write_codes"]


@dataclass(frozen=True)
class CodePages:
    """Codes and gains of all pages; the last two dimensions of `codes`, and the last of `gain`, are contiguous."""

    codes: Tensor  # int64 [pages, H_KV, size, W]
    gain: Tensor  # uint8 [pages, H_KV, size]


def write_codes(encoded: Encoded, slots: Tensor, pages: CodePages) -> None:
    """Write the codes and gains of tokens to their slots, in place.

    Args:
        encoded: of keys `[1, H_KV, T, D]`.
        slots: int64 `[T]`; a token with a negative slot is not written.
        pages: where to write.
    """
    size, kept = pages.codes.shape[2], (slots >= 0).nonzero().squeeze(-1)
    page, place = slots[kept] // size, slots[kept] % size
    pages.codes[page, :, place] = encoded.codes[0].transpose(0, 1)[kept]
    pages.gain[page, :, place] = encoded.gain[0].T[kept]


def read_codes(pages: CodePages, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the codes and gains of sequences, each in one row.

    Args:
        pages: codes and gains of all pages.
        table: int32 `[B, P]`; entries behind the pages of a sequence may be anything.
        lengths: int64 `[B]`, tokens of each sequence, at most `P * size`.

    Returns:
        Codes, int64 `[B, H_KV, P * size, W]`, and gains, uint8 `[B, H_KV, P * size]`. What lies behind the length of a
        sequence is not defined.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check_table(table, lengths)
    size = pages.codes.shape[2]
    used = torch.arange(table.shape[1], device=table.device) < (-(-lengths // size)).unsqueeze(-1)
    read = table.long().where(used, 0)
    return pages.codes[read].transpose(1, 2).flatten(2, 3), pages.gain[read].transpose(1, 2).flatten(2, 3)


def read_tokens(cache: Tensor, where: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """Copy the keys, or the values, of chosen tokens.

    Args:
        cache: `[pages, H_KV, content]`, what a page holds of a KV head; the last dimension is contiguous.
        where: int64 `[size, D]`, where in `content` number `d` of the token in a place lies.
        table: int32 `[B, P]`.
        indices: int64 `[B, H_KV, k]`, tokens of each sequence; -1 is no token.

    Returns:
        `[B, H_KV, k, D]`, with zeros where an index is -1.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check_indices(cache, table, indices)
    size, (batch, kv_heads, _) = where.shape[0], indices.shape
    token = indices.clamp(min=0)
    sequence = torch.arange(batch, device=indices.device).view(-1, 1, 1)
    page = table[sequence, token // size].long().unsqueeze(-1)
    head = torch.arange(kv_heads, device=indices.device).view(1, -1, 1, 1)
    found = cache[page, head, where[token % size]]
    return found.masked_fill((indices < 0).unsqueeze(-1), 0)


def check_table(table: Tensor, lengths: Tensor) -> None:
    """Raise `InputError` unless a table and lengths fit each other."""
    if table.dim() != 2 or table.dtype != torch.int32 or lengths.shape != table.shape[:1]:
        raise InputError(
            f"table must be int32 [B, P] and lengths [B], not {table.dtype} {list(table.shape)} and "
            f"{list(lengths.shape)}"
        )


def check_indices(cache: Tensor, table: Tensor, indices: Tensor) -> None:
    """Raise `InputError` unless indices fit a cache and a table."""
    if indices.dim() != 3 or indices.dtype != torch.int64 or cache.dim() != 3 or cache.shape[1] != indices.shape[1]:
        raise InputError(
            f"indices {indices.dtype} {list(indices.shape)} do not fit a cache of pages {list(cache.shape)}"
        )
    check_table(table, indices[:, 0, 0])
