"""A decoding step in plain torch, written to be read: every backend returns what this file returns.

A step hashes the newest keys (`append`), ranks all keys by their codes, selects the best `k`, and attends to these.
"""

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.codes import check_codes
from bpc_calib.method.encoded import GAIN_UNIT
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.rules import Rules
from bpc_calib.method.scoring import (
    QuantizedQuery,
    group_scores,
    hash_scores,
    quantize_query,
)
from bpc_calib.method.selection import select
from bpc_calib.method.state import Rows, State, read_codes, read_tokens, within, write_codes, write_newest, write_tokens

__all__ = [
    "append", "attend", "best", "check", "check_append", "check_listed", "check_rows", "check_state", "choose",
    "dense_decode", "given", "newest", "newest_slots", "rank", "sparse_decode",
]  # fmt: skip


def append(state: State, codebook: Codebook | None, key: Tensor, value: Tensor | None, at: Tensor) -> None:
    """Write tokens in place: keys, values, and the codes, gains and errors of the keys.

    Args:
        state: what to write to.
        codebook: None: write no codes.
        key: `[B, H_KV, T, D]`; for pages `[1, H_KV, T, D]`.
        value: alike; None: keys and values lie there already, and only codes are written, and keys that are copied.
        at: int64 `[T]`, the slots to write, on the device of the state; of several pages, a token with a negative slot
            is not written.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check_append(state, codebook, key, value, at)
    write_tokens(key, value, at, state)
    if codebook is not None:
        write_codes(encode_with(codebook, key), at, state)


def sparse_decode(
    query: Tensor,
    codebook: Codebook,
    state: State,
    rows: Rows,
    rules: Rules,
    *,
    fresh: int = 0,
    key: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the `k` tokens of each KV head that rank best by their codes.

    Args:
        query: `[B, H_KV, G, D]`, of the newest token of each sequence.
        codebook: what the codes stand for.
        state: what the layer cached.
        rows: the sequences.
        rules: how to rank, and which tokens to always attend to.
        fresh: the newest so many tokens have keys and values, and no codes yet: they are hashed first. Not of pages.
        key: of pages, `[B, H_KV, D]`: the newest key of each sequence, which `append` would hash first.
        out: where to write what is returned, contiguous; None: it is made anew. Attention may have another shape there,
            such as `[B, H_KV * G, D]`.

    Returns:
        Attention `[B, H_KV, G, D]` in the dtype of the query, and the tokens, int64 `[B, H_KV, width]`, ascending, with
        -1 behind the last.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    if fresh or key is not None or out is not None:
        check(query, codebook, state, rows, fresh, key, out)
    if fresh:
        write_newest(encode_with(codebook, newest(state, rows, fresh)), rows, state)
    if key is not None:
        append(state, codebook, key.transpose(0, 1).unsqueeze(0), None, newest_slots(state, rows))
    chosen = choose(query, codebook, state, rows, rules)
    return given(out, (attend(query, state, rows, chosen, rules.scaling), chosen))


def given(out: tuple[Tensor, Tensor] | None, made: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what a step made, where its caller wants it."""
    if out is None:
        return made
    for to, each in zip(out, made, strict=True):
        to.view(each.shape).copy_(each)
    return out


def choose(query: Tensor, codebook: Codebook, state: State, rows: Rows, rules: Rules) -> Tensor:
    """Choose the tokens that `sparse_decode` attends to, all of them hashed; keys and values may be on another device.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check(query, codebook, state, rows)
    rounded = quantize_query(query, codebook.projection, nibbles=codebook.nibbles)
    return best(rounded, state, rows, rules, query.shape[-1])


def dense_decode(query: Tensor, state: State, rows: Rows, scaling: float | None = None, *, new: int = 1) -> Tensor:
    """Attend to all real tokens of each sequence.

    Args:
        query: `[B, H_KV, G * new, D]`, of the `new` newest tokens of each sequence, in order for each query head. Each
            token attends to itself and to those before it.
        state: what the layer cached; finite in the unused part too.
        rows: the sequences; their `k` is not read. With several new tokens all are `longest`, and not in pages.
        scaling: factor on the products q k; None: `D ** -0.5`.
        new: how many tokens.

    Returns:
        `[B, H_KV, G * new, D]` in the dtype of the query.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check(query, None, state, rows, new if new > 1 else 0)
    seen = within(rows)
    if rows.block_table is not None:
        every = torch.arange(rows.longest, device=query.device).where(seen, -1)
        return attend(query, state, rows, every.unsqueeze(1).expand(-1, query.shape[1], -1), scaling)
    keys, values = state.keys[:, :, : rows.longest], state.values[:, :, : rows.longest]
    seen = seen.unsqueeze(1)
    if new > 1:
        seen = seen & torch.ones(new, rows.longest, dtype=torch.bool, device=seen.device).tril(rows.longest - new)
        seen = seen.repeat(1, query.shape[2] // new, 1)
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen.unsqueeze(1), scale=scaling
    )


def newest(state: State, rows: Rows, count: int) -> Tensor:
    """Return the newest keys of sequences that have as many slots in use, `[B, H_KV, count, D]`."""
    return state.keys[:, :, rows.longest - count : rows.longest]


def newest_slots(state: State, rows: Rows) -> Tensor:
    """Return the slots in pages of the newest tokens, int64 `[B]`; -1 of a sequence without tokens."""
    assert rows.block_table is not None
    last = rows.lengths.long() - 1
    page = rows.block_table.gather(1, (last.clamp(min=0) // state.room).unsqueeze(1)).squeeze(1)
    return torch.where(last < 0, -1, page * state.room + last % state.room)


def best(query: QuantizedQuery, state: State, rows: Rows, rules: Rules, head_dim: int) -> Tensor:
    """Choose the `k` tokens of each KV head by their codes: int64 `[B, H_KV, width]`, ascending, -1 behind the last.

    Args:
        query: int16 tables `[B, H_KV, G, H / 4, 16]` and float32 scales `[B, H_KV]`.
        state, rows, rules: as in `sparse_decode`.
        head_dim: dimensions of a key.
    """
    codes, gain = read_codes(state, rows)
    gain = gain if rules.gain else None
    valid = within(rows).unsqueeze(1)
    scores = hash_scores(query, codes, gain)
    ranked = rank(
        scores, query.scale, group=rules.group, gain=gain is not None, scaling=rules.scale(head_dim), valid=valid
    )
    chosen = select(
        ranked, rows.k.expand(ranked.shape[:2]), valid=valid, recent=rules.recent, sink=rules.sink, worst=state.worst,
        safeguard=rules.safeguard,
    )  # fmt: skip
    return torch.nn.functional.pad(chosen, (0, rows.width - chosen.shape[-1]), value=-1)


def rank(
    scores: Tensor, scale: Tensor, *, group: str, gain: bool, scaling: float, valid: Tensor | None = None
) -> Tensor:
    """Call `group_scores` with the logit that fits the scale of the queries; returns `[..., N]`, int32.

    Args:
        scores: int32 `[..., G, N]`, as `hash_scores` returns them.
        scale: float32 `[...]`, of the quantized queries.
        group: one of `GROUPS`.
        gain: whether the scores include the gain.
        scaling: attention's factor on the products q k.
        valid: bool `[..., N]`, as in `group_scores`.

    Raises:
        InputError: the group is unknown.
    """
    return group_scores(scores, group, valid=valid, logit=(GAIN_UNIT if gain else 1) / (scale * scaling))


def attend(query: Tensor, state: State, rows: Rows, indices: Tensor, scaling: float | None = None) -> Tensor:
    """Attend to listed tokens only, int64 `[B, H_KV, k]`, with -1 behind the last. Returns `[B, H_KV, G, D]`."""
    check_listed(query, indices)
    keys, values = (each.to(query.dtype) for each in read_tokens(state, rows, indices))
    none = indices < 0
    mask = ~none.unsqueeze(-2) if none.any() else None
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)


def check_listed(query: Tensor, indices: Tensor) -> None:
    """Raise `InputError` unless there is a list for each KV head of the queries `[B, H_KV, G, D]`."""
    if indices.dtype != torch.int64 or indices.dim() != 3 or indices.shape[:2] != query.shape[:2]:
        wanted = f"int64 [{query.shape[0]}, {query.shape[1]}, k]"
        raise InputError(f"indices must be {wanted}, not {indices.dtype} {list(indices.shape)}")


def check(
    query: Tensor,
    codebook: Codebook | None,
    state: State,
    rows: Rows,
    fresh: int = 0,
    key: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Raise `InputError` unless a step accepts the arguments. Reads no tensor values, not to wait for a device.

    Args:
        query, codebook, state, rows, fresh, key, out: as in `sparse_decode`; without a codebook as in `dense_decode`.
    """
    check_state(query, codebook, state, paged=rows.block_table is not None)
    check_rows(query, state, rows, fresh, key, out)


def check_state(query: Tensor, codebook: Codebook | None, state: State, *, paged: bool) -> None:
    """The part of `check` that holds for as long as the shape of the queries, the codebook and the state do."""
    if query.dim() != 4 or not query.dtype.is_floating_point:
        raise InputError(f"query must be floating [B, H_KV, G, D], not {query.dtype} {list(query.shape)}")
    batch, kv_heads, _, dim = query.shape
    room = state.room
    lead = (state.keys.shape[0] if paged else batch, kv_heads)
    dtype = query.dtype if state.scales is None else torch.float8_e4m3fn
    for name, tensor, last, kind in (
        ("keys", state.keys, (dim,), dtype),
        ("values", state.values, (dim,), dtype),
        ("codes", state.codes, None if codebook is None else (codebook.words,), torch.int64),
        ("gain", state.gain, (), torch.uint8),
        ("error", state.error, (), torch.float32),
    ):
        if tensor is None or last is None or (state.values_at is not None and name == "values"):
            continue
        shape = tensor.shape
        holds = len(shape) > 2 and (not paged or shape[2] == room)
        if shape[:2] != lead or shape[3:] != last or not holds or tensor.dtype != kind:
            raise InputError(f"{name} {tensor.dtype} {list(shape)} do not fit query {query.dtype} {list(query.shape)}")
    if state.values_at is not None and state.values_at.shape != (room, dim):
        raise InputError(f"values at {list(state.values_at.shape)} do not fit pages of {room} tokens of {dim} numbers")
    if paged and state.worst is not None:
        raise InputError("pages take no padding, no fresh tokens and no safeguard")
    if codebook is not None:
        _check_codes(query, codebook, state)


def check_rows(
    query: Tensor,
    state: State,
    rows: Rows,
    fresh: int = 0,
    key: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> None:
    """The rest of `check`, for queries and a state that fit each other."""
    (batch, kv_heads, _, dim), table = query.shape, rows.block_table
    if rows.lengths.shape != (batch,) or rows.lengths.dtype.is_floating_point:
        raise InputError(f"lengths must be integers [{batch}], not {rows.lengths.dtype} {list(rows.lengths.shape)}")
    if rows.k.dtype.is_floating_point or rows.k.shape not in ((batch, 1), (batch, kv_heads)):
        raise InputError(f"k must be integers [B, 1] or [B, H_KV], not {rows.k.dtype} {list(rows.k.shape)}")
    if table is not None and (table.dim() != 2 or table.dtype != torch.int32 or table.shape[0] != batch):
        raise InputError(f"block_table must be int32 [{batch}, P], not {table.dtype} {list(table.shape)}")
    short = state.short(rows.longest) if table is None else None
    if table is not None and rows.longest > state.room * table.shape[1]:
        short = f"{table.shape[1]} pages of {state.room} tokens"
    if short or not 0 <= rows.width <= rows.longest:
        raise InputError(f"{short or 'lists'} do not fit {rows.width} of {rows.longest} tokens")
    valid = rows.valid
    if valid is not None and (
        valid.dtype != torch.bool or valid.dim() != 2 or len(valid) != batch or valid.shape[1] < rows.longest
    ):
        raise InputError(f"valid must be bool [{batch}, {rows.longest}], not {valid.dtype} {list(valid.shape)}")
    if table is not None and (valid is not None or fresh):
        raise InputError("pages take no padding, no fresh tokens and no safeguard")
    if key is not None and (table is None or key.dtype != query.dtype or key.shape != (batch, kv_heads, dim)):
        wanted = f"{query.dtype} {[batch, kv_heads, dim]} of pages"
        raise InputError(f"the newest keys must be {wanted}, not {key.dtype} {list(key.shape)}")
    if out is None:
        return
    attention, tokens = out
    if attention.numel() != query.numel() or attention.dtype != query.dtype or not attention.is_contiguous():
        raise InputError(f"attention needs contiguous {query.dtype} {list(query.shape)} in `out`")
    if tokens.shape != (batch, kv_heads, rows.width) or tokens.dtype != torch.int64 or not tokens.is_contiguous():
        raise InputError(f"tokens need contiguous torch.int64 {[batch, kv_heads, rows.width]} in `out`")


def _check_codes(query: Tensor, codebook: Codebook, state: State) -> None:
    batch, kv_heads, _, dim = query.shape
    projection, worst = codebook.projection, state.worst
    if state.codes is None:
        raise InputError("a sparse step needs codes")
    check_codes(state.codes, codebook.bits)
    if projection.shape[:-2] not in ((kv_heads,), (batch, kv_heads)) or projection.shape[-1] != dim:
        raise InputError(f"projection {list(projection.shape)} does not fit query {list(query.shape)}")
    if projection.dtype != query.dtype:
        raise InputError(f"a codebook for {projection.dtype} does not fit query {query.dtype}")
    if worst is not None and (worst.dtype.is_floating_point or worst.shape[:-1] != (batch, kv_heads)):
        raise InputError(f"worst must be integers [{batch}, {kv_heads}, L], not {worst.dtype} {list(worst.shape)}")


def check_append(state: State, codebook: Codebook | None, key: Tensor, value: Tensor | None, at: Tensor) -> None:
    """Raise `InputError` unless `append` accepts the arguments. Reads no tensor values, not to wait for a device.

    Args:
        state, codebook, key, value, at: as in `append`.
    """
    if at.dim() != 1 or at.dtype.is_floating_point or key.dim() != 4 or at.shape[0] != key.shape[2]:
        raise InputError(f"at must be integers [T] for keys [B, H_KV, T, D], not {at.dtype} {list(at.shape)}")
    for name, new, buffer in (("key", key, state.keys), ("value", value, state.values)):
        if new is None or (value is None and not state.copied):
            continue
        lead = (new.shape[0] if new.shape[0] == 1 else buffer.shape[0], buffer.shape[1])
        if buffer.dim() != 4 or new.shape != (*lead, len(at), buffer.shape[3]):
            raise InputError(f"{name} {list(new.shape)} does not fit its buffer {list(buffer.shape)}")
        if new.dtype != buffer.dtype:
            raise InputError(f"{name} {new.dtype} does not fit its buffer {buffer.dtype}")
    if codebook is not None and state.codes is None:
        raise InputError("a codebook needs a state with codes")
    if codebook is not None:
        codebook.check(key)
        if state.codes is not None and state.codes.shape[-1] != codebook.words:
            raise InputError(f"codes of {codebook.bits} bits do not fit {list(state.codes.shape)}")
    if value is None and codebook is None:
        raise InputError("append needs values or a codebook")
