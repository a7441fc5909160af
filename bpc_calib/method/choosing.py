"""Choose the tokens to attend to from queries and codes. Every backend must return the same indices as this file."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codes import check_codes
from bpc_calib.method.encoded import GAIN_UNIT
from bpc_calib.method.scoring import (
    GROUPS,
    LARGEST_LIMIT,
    RELATIVE_LIMIT,
    QuantizedQuery,
    check_group,
    group_scores,
    hash_scores,
    quantize_query,
)
from bpc_calib.method.selection import check_forced, select

__all__ = ["Cached", "Choice", "check", "choose", "choose_quantized", "rank", "within"]


@dataclass(frozen=True)
class Choice:
    """How a decoding step ranks tokens, and which tokens it attends to whatever their rank."""

    scaling: float  # attention's factor on the products q k: it defines the size of one logit
    group: str = GROUPS[0]  # as in `group_scores`
    recent: int = 0  # newest tokens, always attended
    sink: int = 0  # first tokens, always attended
    safeguard: float = 0.0  # largest share of k for the tokens of `Cached.worst`


@dataclass(frozen=True)
class Cached:
    """What a cache holds for its N tokens in addition to keys and values."""

    codes: Tensor  # int64 [B, H_KV, N, W]
    gain: Tensor | None = None  # uint8 [B, H_KV, N]; None ranks without the gain
    valid: Tensor | None = None  # bool [B, N], False for padding; None: no padding
    lengths: Tensor | None = None  # integers [B], tokens in use; None: all N
    worst: Tensor | None = None  # integers [B, H_KV, L], candidates of the safeguard, no duplicates (`worst_first`)


def choose(
    query: Tensor,
    projection: Tensor,
    cached: Cached,
    k: int | Tensor,
    choice: Choice,
    *,
    width: int | None = None,
) -> Tensor:
    """Choose the `k` tokens that the newest token attends to, by the codes of their keys.

    Runs `quantize_query`, `hash_scores`, `group_scores` and `select`.

    Args:
        query: `[B, H_KV, G, D]`.
        projection: `[H_KV, H, D]`, or `[B, H_KV, H, D]`.
        cached: codes and gains of the cached keys.
        k: number of tokens, at most the number of valid tokens; or integers `[B, 1]` or `[B, H_KV]`.
        choice: how to rank, and which tokens to always attend to.
        width: size of the last dimension of the result, at least the largest `k`; None: the largest `k`.

    Returns:
        int64 `[B, H_KV, width]`, ascending, with -1 after the last index.

    Raises:
        InputError: the shapes, dtypes or values do not fit.
    """
    check(query, projection, cached, k, choice)
    return choose_quantized(quantize_query(query, projection), cached, k, choice, width=width)


def check(query: Tensor, projection: Tensor, cached: Cached, k: int | Tensor, choice: Choice) -> None:
    """Raise `InputError` unless `choose` accepts the arguments. Reads no tensor values, not to wait for a device.

    Args:
        query, projection, cached, k, choice: as in `choose`.
    """
    codes = cached.codes
    if query.dim() != 4 or not query.dtype.is_floating_point:
        raise InputError(f"query must be floating [B, H_KV, G, D], not {query.dtype} {list(query.shape)}")
    batch, kv_heads, _, dim = query.shape
    check_codes(codes, projection.shape[-2])
    if projection.shape[:-2] not in ((kv_heads,), (batch, kv_heads)) or projection.shape[-1] != dim:
        raise InputError(f"projection {list(projection.shape)} does not fit query {list(query.shape)}")
    if codes.dim() != 4 or codes.shape[:2] != query.shape[:2]:
        raise InputError(f"codes {list(codes.shape)} do not fit query {list(query.shape)}")
    tokens = codes.shape[2]
    for name, tensor, shape, kind in (
        ("gain", cached.gain, codes.shape[:3], torch.uint8),
        ("valid", cached.valid, (batch, tokens), torch.bool),
        ("lengths", cached.lengths, (batch,), None),
        ("worst", cached.worst, (batch, kv_heads, -1), None),
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
        raise InputError(f"k must be between 0 and the {tokens} cached tokens, not {k}")
    check_group(choice.group)
    check_forced(choice.recent, choice.sink, choice.safeguard)


def _same(found: int, wanted: int) -> bool:  # -1 allows any size
    return wanted in (-1, found)


def choose_quantized(
    query: QuantizedQuery, cached: Cached, k: int | Tensor, choice: Choice, *, width: int | None = None
) -> Tensor:
    """Do the same as `choose` for queries that are already quantized.

    Args:
        query: int8 values `[B, H_KV, G, H]` and float32 scales `[B, H_KV]`.
        cached, k, choice, width: as in `choose`.

    Returns:
        int64 `[B, H_KV, width]`, ascending, with -1 after the last index.

    Raises:
        InputError: codes or gains do not fit the queries, or `k` exceeds the number of valid tokens.
    """
    codes, valid = cached.codes, cached.valid
    if cached.lengths is not None:
        valid = within(cached.lengths, codes.shape[2], valid)
    valid = None if valid is None else valid.unsqueeze(1)
    scores = hash_scores(query, codes, cached.gain)
    ranked = rank(
        scores, query.scale, group=choice.group, gain=cached.gain is not None, scaling=choice.scaling, valid=valid
    )
    chosen = select(
        ranked, k, valid=valid, recent=choice.recent, sink=choice.sink, worst=cached.worst, safeguard=choice.safeguard
    )
    missing = 0 if width is None else width - chosen.shape[-1]
    return torch.nn.functional.pad(chosen, (0, missing), value=-1) if missing > 0 else chosen


def within(lengths: Tensor, tokens: int, valid: Tensor | None) -> Tensor:
    """Return bool `[B, tokens]`: True for valid tokens within the lengths `[B]`."""
    in_use = torch.arange(tokens, device=lengths.device) < lengths.unsqueeze(-1)
    return in_use if valid is None else valid & in_use


def rank(
    scores: Tensor, scale: Tensor, *, group: str, gain: bool, scaling: float, valid: Tensor | None = None
) -> Tensor:
    """Call `group_scores` with the limit that fits the scale of the queries; returns `[..., N]`, int32.

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
    logit = (GAIN_UNIT if gain else 1) / (scale * scaling)  # one logit, in the unit of the scores
    limit = (RELATIVE_LIMIT * logit).clamp(max=LARGEST_LIMIT).to(scores.dtype)
    return group_scores(scores, group, valid=valid, limit=limit)
