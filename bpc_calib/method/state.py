"""What a decoding step reads and writes: the sequences of the step, and what one layer cached of them.

A dense cache has a row of slots for each sequence. In a paged one, as inference servers keep it, a page has room for
`size` tokens of every KV head, a block table lists the pages of a sequence in order, and the slot of a token is
`page * size + place`. A `State` is the same in both; the `Rows` say which it is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.method.encoded import Encoded

__all__ = [
    "Rows",
    "State",
    "alike",
    "read_codes",
    "read_tokens",
    "within",
    "write_codes",
    "write_newest",
    "write_tokens",
]


@dataclass(frozen=True, eq=False)
class Rows:
    """The sequences of a step: one object for all layers that attend to as many tokens."""

    lengths: Tensor  # integers [B], slots in use, the newest token included
    k: Tensor  # integers [B, 1] or [B, H_KV], tokens to attend to, at most the real ones
    longest: int  # on the host: no length is above it
    width: int  # on the host: no `k` is above it
    valid: Tensor | None = None  # bool [B, room], False for padding; None: no padding. Not with a block table
    block_table: Tensor | None = None  # int32 [B, P], contiguous; entries behind a sequence's pages may be anything


@dataclass(frozen=True, eq=False)
class State:
    """What one layer cached; whoever keeps it owns the tensors, and the last dimension of each is contiguous.

    The first dimension is that of the sequences, or of the pages; `room` is the size of a page there.
    """

    keys: Tensor  # [B, H_KV, room, D]
    values: Tensor  # alike; with `values_at` [pages, H_KV, content]
    codes: Tensor | None = None  # int64 [B, H_KV, room, W], the last two dimensions contiguous; None: nothing is hashed
    gain: Tensor | None = None  # uint8 [B, H_KV, room]; None: not kept
    error: Tensor | None = None  # float32 [B, H_KV, room]; None: not kept
    worst: Tensor | None = None  # int32 [B, H_KV, L], candidates of the safeguard, no duplicates (`worst_first`)
    # Where a server's kernels put number `d` of the value in a place of a page: int64 [room, D], contiguous.
    values_at: Tensor | None = None
    copied: bool = False  # whether a server writes the values, and `append` the keys, which are a copy in rows
    # Of float8_e4m3fn: keys and values are what is cached times these, float32 with one number each.
    scales: tuple[Tensor, Tensor] | None = None
    mapped: bool = False  # whether keys and values lie in a mapped file, the value of a token behind its key

    @property
    def room(self) -> int:
        """Tokens that each row of slots, or each page, has room for."""
        return (self.keys if self.codes is None else self.codes).shape[2]

    def short(self, tokens: int) -> str | None:
        """What has no room for so many tokens in each row of slots; None: nothing."""
        for name in ("keys", "values", "codes", "gain", "error"):
            held = getattr(self, name)
            if held is not None and held.shape[2] < tokens:
                return f"{name} with room for {held.shape[2]}"
        return None


def alike(keys: Tensor, k: int) -> Rows:
    """Return the sequences of a step over keys `[B, H_KV, N, D]` that attends to `k` of the `N` tokens of each."""
    lengths = torch.full((len(keys),), keys.shape[2], device=keys.device)
    return Rows(lengths, torch.full_like(lengths, k).unsqueeze(-1), keys.shape[2], k)


def write_codes(encoded: Encoded, at: Tensor, state: State) -> None:
    """Write the codes, gains and errors of `T` tokens to their slots, in place, as far as they are kept.

    Args:
        encoded: of keys `[B, H_KV, T, D]`, or for pages `[1, H_KV, T, D]`.
        at: int64 `[T]`, the slots; of several pages, a token with a negative slot is not written.
        state: where to write.
    """
    for to, new in _kept(encoded, state):
        _write(to, new, at)


def write_newest(encoded: Encoded, rows: Rows, state: State) -> None:
    """Write the codes, gains and errors of the newest tokens, in place, which lie in the same slots of every sequence.

    Args:
        encoded: of keys `[B, H_KV, T, D]`.
        rows: the sequences, of which each has `longest` slots in use.
        state: where to write; not pages.
    """
    first = rows.longest - encoded.codes.shape[2]
    for to, new in _kept(encoded, state):
        to[:, :, first : rows.longest] = new


def write_tokens(key: Tensor, value: Tensor | None, at: Tensor, state: State) -> None:
    """Write the keys and values of `T` tokens to their slots, in place; without values nothing but copied keys.

    Args:
        key, value: `[B, H_KV, T, D]`, or for pages `[1, H_KV, T, D]`.
        at: as in `write_codes`.
        state: where to write.
    """
    if value is not None or state.copied:
        _write(state.keys, key, at)
    if value is not None:
        _write(state.values, value, at)


def _kept(encoded: Encoded, state: State) -> list[tuple[Tensor, Tensor]]:
    """What of keys is kept beside them: where, and what."""
    pairs = ((state.codes, encoded.codes), (state.gain, encoded.gain), (state.error, encoded.error))
    return [(to, new) for to, new in pairs if to is not None]


def _write(to: Tensor, new: Tensor, at: Tensor) -> None:
    """Write `new [B, H_KV, T, ...]` to the slots `at [T]` of `to [B, H_KV, room, ...]` or, with B = 1, of pages."""
    if new.shape[0] > 1 or at.shape[0] == 1 == to.shape[0]:
        to.index_copy_(2, at, new)
        return
    kept = (at >= 0).nonzero().squeeze(-1)
    page, place = at[kept] // to.shape[2], at[kept] % to.shape[2]
    to[page, :, place] = new[0].transpose(0, 1)[kept]


def within(rows: Rows) -> Tensor:
    """Return bool `[B, longest]`: True for the real tokens of each sequence."""
    in_use = torch.arange(rows.longest, device=rows.lengths.device) < rows.lengths.unsqueeze(-1)
    return in_use if rows.valid is None else rows.valid[:, : rows.longest] & in_use


def read_codes(state: State, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Return the codes, int64 `[B, H_KV, longest, W]`, and gains, uint8 `[B, H_KV, longest]`, of sequences.

    What lies behind the length of a sequence is not defined.
    """
    codes, gain = state.codes, state.gain
    assert codes is not None
    if rows.block_table is not None:
        size = codes.shape[2]
        table = rows.block_table[:, : -(-rows.longest // size)]
        used = torch.arange(table.shape[1], device=table.device) < (-(-rows.lengths // size)).unsqueeze(-1)
        read = table.long().where(used, 0)
        codes = codes[read].transpose(1, 2).flatten(2, 3)
        gain = None if gain is None else gain[read].transpose(1, 2).flatten(2, 3)
    return codes[:, :, : rows.longest], None if gain is None else gain[:, :, : rows.longest]


def read_tokens(state: State, rows: Rows, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the keys and values of chosen tokens.

    Args:
        state: keys and values.
        rows: the sequences.
        indices: int64 `[B, H_KV, k]`, tokens of each sequence; -1 is no token.

    Returns:
        `[B, H_KV, k, D]` each, of token 0 where an index is -1; float32 from a cache of 8 bits.
    """
    token = indices.clamp(min=0)
    if rows.block_table is None:
        each = token.unsqueeze(-1).expand(*token.shape, state.keys.shape[-1])
        return state.keys.gather(2, each), state.values.gather(2, each)
    batch, kv_heads, _ = indices.shape
    size, device = state.room, indices.device
    page = rows.block_table[torch.arange(batch, device=device).view(-1, 1, 1), token // size].long()
    head, place = torch.arange(kv_heads, device=device).view(1, -1, 1), token % size
    if state.values_at is not None:
        values = state.values[page.unsqueeze(-1), head.unsqueeze(-1), state.values_at[place]]
        return state.keys[page, head, place], values
    if state.scales is None:
        return state.keys[page, head, place], state.values[page, head, place]
    keys, values = (  # as bytes: torch 2.8 indexes no 8-bit floats
        cached.view(torch.uint8)[page, head, place].view(cached.dtype).float() * scale
        for cached, scale in zip((state.keys, state.values), state.scales, strict=True)
    )
    return keys, values
