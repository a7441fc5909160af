"""Codes, keys and values in pages, as inference servers keep them: the plain torch form.

A page has room for `size` tokens of every KV head. The table of a sequence lists its pages in order, and the slot of a
token is `page * size + place`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.choosing import Cached, Choice, choose
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder, encode_with
from bpc_calib.method.sparse_attention import sparse_attention

__all__ = [
    "CodePages",
    "Fresh",
    "Packing",
    "Paged",
    "Rows",
    "attend_pages",
    "check",
    "check_table",
    "hash_into",
    "read_codes",
    "read_tokens",
    "write_codes",
]


@dataclass(frozen=True, eq=False)
class CodePages:
    """Codes and gains of all pages; the last two dimensions of `codes`, and the last of `gain`, are contiguous."""

    codes: Tensor  # int64 [pages, H_KV, size, W]
    gain: Tensor  # uint8 [pages, H_KV, size]


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the kernels of a server put number `d` of the token in a place: `keys[place, d]` in what a page holds."""

    keys: Tensor  # int64 [size, D], contiguous
    values: Tensor  # int64 [size, D], contiguous


@dataclass(frozen=True, eq=False)
class Paged:
    """What is cached of a layer."""

    codes: CodePages
    # [pages, H_KV, size, 2 D], the key of a token and then its value; with a packing [pages, H_KV, content]. The last
    # dimension is contiguous.
    cache: Tensor
    packing: Packing | None = None
    # Of a cache of float8_e4m3fn: keys and values are what is cached times these, float32 with one number each.
    scales: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """The sequences of a step, the same in all layers."""

    table: Tensor  # int32 [B, P], contiguous; entries behind the pages of a sequence may be anything
    lengths: Tensor  # int64 [B], tokens of each sequence, at most `P * size`
    k: Tensor  # int64 [B], tokens that each sequence attends to
    width: int  # the largest `k`


@dataclass(frozen=True)
class Fresh:
    """Keys that are not hashed yet, and their slots."""

    encoder: Encoder
    keys: Tensor  # [1, H_KV, T, D]
    slots: Tensor  # integers [T]; a token with a negative slot is not written


def hash_into(fresh: Fresh, pages: CodePages) -> None:
    """Hash keys, and write their codes and gains to their slots, in place."""
    write_codes(encode_with(fresh.encoder, fresh.keys), fresh.slots, pages)


def attend_pages(
    query: Tensor,
    projection: Tensor,
    paged: Paged,
    rows: Rows,
    choice: Choice,
    *,
    gain: bool = True,
    fresh: Fresh | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose tokens by their codes, and attend to them.

    Args:
        query: `[B, H_KV, G, D]`, one query per head and sequence.
        projection: `[H_KV, H, D]`, for queries, in their dtype.
        paged: codes, keys and values.
        rows: the sequences.
        choice: the rules.
        gain: whether scores are weighted by gains.
        fresh: keys to hash first, of these and other sequences.

    Returns:
        Attention `[B, H_KV, G, D]` in the dtype of the query, and the tokens chosen, int64 `[B, H_KV, width]`,
        ascending, with -1 behind the last.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check(query, projection, paged, rows)
    if fresh is not None:
        hash_into(fresh, paged.codes)
    codes, gains = read_codes(paged.codes, rows.table, rows.lengths)
    cached = Cached(codes, gains if gain else None, lengths=rows.lengths)
    chosen = choose(query, projection, cached, rows.k.unsqueeze(-1), choice, width=rows.width)
    keys, values = (each.to(query.dtype) for each in read_tokens(paged, rows.table, chosen))
    places = torch.arange(rows.width, device=chosen.device).expand_as(chosen).where(chosen >= 0, -1)
    return sparse_attention(query, keys, values, places, choice.scaling), chosen


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


def read_tokens(paged: Paged, table: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the keys and values of chosen tokens.

    Args:
        paged: keys and values of all pages.
        table: int32 `[B, P]`.
        indices: int64 `[B, H_KV, k]`, tokens of each sequence; -1 is no token.

    Returns:
        `[B, H_KV, k, D]` each, with zeros where an index is -1; float32 from a cache of 8 bits.

    """
    size, (batch, kv_heads, _) = paged.codes.codes.shape[2], indices.shape
    token, device = indices.clamp(min=0), indices.device
    page = table[torch.arange(batch, device=device).view(-1, 1, 1), token // size].long()
    head, place = torch.arange(kv_heads, device=device).view(1, -1, 1), token % size
    cache = paged.cache if paged.scales is None else paged.cache.view(torch.uint8)  # torch 2.8 indexes no 8-bit floats
    if paged.packing is None:
        keys, values = cache[page, head, place].chunk(2, dim=-1)
    else:
        page, head = page.unsqueeze(-1), head.unsqueeze(-1)
        keys, values = (cache[page, head, at[place]] for at in (paged.packing.keys, paged.packing.values))
    if paged.scales is not None:
        keys, values = (
            each.view(paged.cache.dtype).float() * scale
            for each, scale in zip((keys, values), paged.scales, strict=True)
        )
    none = (indices < 0).unsqueeze(-1)
    return keys.masked_fill(none, 0), values.masked_fill(none, 0)


def check(query: Tensor, projection: Tensor, paged: Paged, rows: Rows) -> None:
    """Raise `InputError` unless the arguments of `attend_pages` fit each other.

    Args:
        query, projection, paged, rows: as in `attend_pages`.
    """
    (batch, kv_heads, _, dim), (_, heads, size, _) = query.shape, paged.codes.codes.shape
    check_table(rows.table, rows.lengths)
    packing, eight = paged.packing, torch.float8_e4m3fn
    lies = (
        paged.cache.shape[2:] == (size, 2 * dim)
        if packing is None
        else packing.keys.shape == packing.values.shape == (size, dim)
    )
    fits = (
        lies
        and heads == kv_heads == paged.cache.shape[1]
        and projection.shape == (kv_heads, projection.shape[-2], dim)
        and rows.k.shape == rows.lengths.shape == (batch,)
        and projection.dtype == query.dtype
        and paged.cache.dtype == (query.dtype if paged.scales is None else eight)
    )
    if not fits:
        raise InputError(
            f"query {query.dtype} {list(query.shape)}, projection {projection.dtype} {list(projection.shape)} and k "
            f"{list(rows.k.shape)} do not fit a cache of pages {paged.cache.dtype} {list(paged.cache.shape)} and "
            f"{len(rows.table)} sequences"
        )


def check_table(table: Tensor, lengths: Tensor) -> None:
    """Raise `InputError` unless a table, int32 `[B, P]`, and lengths `[B]` fit each other."""
    if table.dim() != 2 or table.dtype != torch.int32 or lengths.shape != table.shape[:1]:
        raise InputError(
            f"table must be int32 [B, P] and lengths [B], not {table.dtype} {list(table.shape)} and "
            f"{list(lengths.shape)}"
        )
