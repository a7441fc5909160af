"""From queries and codes to the tokens attended, in plain torch: what the kernels must equal."""

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codes import check_codes
from bpc_calib.method.scoring import (
    GROUPS,
    RELATIVE_LIMIT,
    QuantizedQuery,
    check_group,
    group_scores,
    hash_scores,
    quantize_query,
)
from bpc_calib.method.selection import check_forced, select

__all__ = ["check", "choose", "choose_asked", "rank", "within"]


def choose(
    query: Tensor,
    projection: Tensor,
    codes: Tensor,
    gain: Tensor | None,
    k: int | Tensor,
    *,
    scaling: float,
    group: str = GROUPS[0],
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    worst: Tensor | None = None,
    safeguard: float = 0.0,
    width: int | None = None,
) -> Tensor:
    """Choose the `k` tokens that the newest one attends to, by the codes of their keys.

    `quantize_query`, `hash_scores`, `group_scores` and `select` in one.

    Args:
        query: `[B, H_KV, G, D]`.
        projection: `[H_KV, H, D]`, or `[B, H_KV, H, D]`.
        codes: int64 `[B, H_KV, N, W]`.
        gain: uint8 `[B, H_KV, N]`; None ranks without.
        k: how many, at most the number of real tokens; or integers `[B, 1]` or `[B, H_KV]`.
        scaling: of the products, as attention takes it: what is one logit.
        group: as in `group_scores`.
        valid: bool `[B, N]`; False is padding.
        lengths: integers `[B]`; what lies behind so many tokens is no token. None: there are N.
        recent: newest tokens always attended.
        sink: first tokens always attended.
        worst: integers `[B, H_KV, L]`, the tokens that the safeguard draws from, none twice (`worst_first`).
        safeguard: share of `k` that it may take.
        width: of the result, at least every `k`; None: the largest `k`.

    Returns:
        int64 `[B, H_KV, width]`, ascending, -1 behind the last.

    Raises:
        InputError: shapes, dtypes or values that do not fit.
    """
    check(query, projection, codes, gain, k, group, valid, lengths, recent, sink, worst, safeguard)
    asked = quantize_query(query, projection)
    return choose_asked(
        asked, codes, gain, k, scaling=scaling, group=group, valid=valid, lengths=lengths, recent=recent, sink=sink,
        worst=worst, safeguard=safeguard, width=width,
    )  # fmt: skip


def check(
    query: Tensor,
    projection: Tensor,
    codes: Tensor,
    gain: Tensor | None,
    k: int | Tensor,
    group: str,
    valid: Tensor | None,
    lengths: Tensor | None,
    recent: int,
    sink: int,
    worst: Tensor | None,
    safeguard: float,
) -> None:
    """Raise `InputError` unless these are what `choose` takes, as far as that shows without waiting for a device."""
    if query.dim() != 4 or not query.dtype.is_floating_point:
        raise InputError(f"query must be floating [B, H_KV, G, D], not {query.dtype} {list(query.shape)}")
    (batch, kv_heads, _, dim), bits = query.shape, projection.shape[-2]
    check_codes(codes, bits)
    if projection.shape not in ((kv_heads, bits, dim), (batch, kv_heads, bits, dim)):
        raise InputError(f"projection {list(projection.shape)} does not fit query {list(query.shape)}")
    if codes.dim() != 4 or codes.shape[:2] != query.shape[:2]:
        raise InputError(f"codes {list(codes.shape)} do not fit query {list(query.shape)}")
    tokens = codes.shape[2]
    for name, tensor, shape, kind in (
        ("gain", gain, codes.shape[:3], torch.uint8),
        ("valid", valid, (batch, tokens), torch.bool),
        ("lengths", lengths, (batch,), None),
        ("worst", worst, (batch, kv_heads, -1), None),
    ):
        if tensor is None:
            continue
        fits = len(tensor.shape) == len(shape) and all(map(_same, tensor.shape, shape))
        if not fits or tensor.dtype.is_floating_point or (kind is not None and tensor.dtype != kind):
            raise InputError(f"{name} {tensor.dtype} {list(tensor.shape)} does not fit codes {list(codes.shape)}")
    if isinstance(k, Tensor):
        if k.dtype.is_floating_point or k.shape not in ((batch, 1), (batch, kv_heads)):
            raise InputError(f"k must be integers [B, 1] or [B, H_KV], not {k.dtype} {list(k.shape)}")
    elif not 0 <= k <= tokens:
        raise InputError(f"k must be between 0 and the {tokens} tokens there are, not {k}")
    check_group(group)
    check_forced(recent, sink, safeguard)


def _same(found: int, wanted: int) -> bool:
    return wanted in (-1, found)


def choose_asked(
    asked: QuantizedQuery,
    codes: Tensor,
    gain: Tensor | None,
    k: int | Tensor,
    *,
    scaling: float,
    group: str,
    valid: Tensor | None,
    lengths: Tensor | None,
    recent: int,
    sink: int,
    worst: Tensor | None,
    safeguard: float,
    width: int | None,
) -> Tensor:
    """`choose` for queries already rounded."""
    if lengths is not None:
        valid = within(lengths, codes.shape[2], valid)
    valid = None if valid is None else valid.unsqueeze(1)
    scores = hash_scores(asked, codes, gain)
    ranked = rank(scores, asked.scale, group=group, gain=gain is not None, scaling=scaling, valid=valid)
    chosen = select(ranked, k, valid=valid, recent=recent, sink=sink, worst=worst, safeguard=safeguard)
    missing = 0 if width is None else width - chosen.shape[-1]
    return torch.nn.functional.pad(chosen, (0, missing), value=-1) if missing > 0 else chosen


def within(lengths: Tensor, tokens: int, valid: Tensor | None) -> Tensor:
    """bool `[B, tokens]`: what lies within the lengths `[B]`, and is valid."""
    held = torch.arange(tokens, device=lengths.device) < lengths.unsqueeze(-1)
    return held if valid is None else valid & held


def rank(
    scores: Tensor, scale: Tensor, *, group: str, gain: bool, scaling: float, valid: Tensor | None = None
) -> Tensor:
    """`group_scores` of scores `[..., G, N]` of queries with this `scale [...]`, with the limit that is theirs."""
    logit = (64 if gain else 1) / (scale * scaling)  # what one logit is in the unit of the scores
    limit = (RELATIVE_LIMIT * logit).clamp(max=1 << 24).to(scores.dtype)
    return group_scores(scores, group, valid=valid, limit=limit)
