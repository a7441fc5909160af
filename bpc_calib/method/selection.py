"""Select the tokens to attend to: forced tokens first, then the best scores."""

import functools
from fractions import Fraction

import torch
from torch import Tensor

from bpc_calib.errors import InputError

__all__ = ["as_fraction", "check_forced", "select", "sortable", "worst_first"]

# One int64 holds a token's rule, value and index, in at most 2, 32 and INDEX_BITS bits.
INDEX_BITS = 28


def select(
    scores: Tensor,
    k: int | Tensor,
    *,
    valid: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    worst: Tensor | None = None,
    safeguard: float = 0.0,
) -> Tensor:
    """Choose `k` tokens for each row of `scores`: ascending indices, int64 `[..., k]`.

    The rules apply in this order, and each skips tokens that are already chosen: the newest `recent` tokens, the
    first `sink` tokens, the first `floor(safeguard * k)` tokens of `worst`, then the best scores. Ties go to the
    lower index. If the forced tokens exceed `k`, earlier rules win and the result still has `k` tokens.

    Args:
        scores: integers that fit int32, `[..., N]`, one row per KV head (already reduced over its group).
        k: number of tokens, at most the number of valid tokens; or int64 `[...]`, one number per row. Rows with a
            smaller `k` than the largest end in -1.
        valid: bool `[..., N]`; False is padding: never selected, and not counted by `recent` and `sink`.
        worst: integers `[..., L]`, the candidates of the safeguard in order, without duplicates
            (`worst_first`); -1 is no token.
        safeguard: largest share of `k` for the safeguard, in [0, 1].

    Raises:
        InputError: an argument is out of range, or `k` exceeds the number of valid tokens.
    """
    if scores.dtype.is_floating_point or scores.dim() < 1:
        raise InputError(f"scores must be integers [..., N], not {scores.dtype} {list(scores.shape)}")
    if scores.dtype == torch.int64 and (scores.abs() >= 1 << 31).any():
        raise InputError("scores must fit int32")
    check_forced(recent, sink, safeguard)
    rows, count = scores.shape[:-1], scores.shape[-1]
    device = scores.device
    if count >= 1 << INDEX_BITS:
        raise InputError(f"select supports fewer than {1 << INDEX_BITS:,} tokens, not {count:,}")
    wanted = torch.as_tensor(k, device=device).expand(rows)
    position = torch.arange(count, device=device)
    if valid is None:
        lengths, nth = torch.full(rows, count, device=device), position
        valid = torch.ones((), dtype=torch.bool, device=device)
    else:
        valid = valid.expand(scores.shape)
        lengths, nth = valid.sum(-1), valid.cumsum(-1) - 1  # the place of each token among the valid tokens of its row
    if (wanted < 0).any() or (wanted > lengths).any():
        raise InputError("k must be between 0 and the number of valid tokens")
    width = int(wanted.max()) if wanted.numel() else 0

    newest = valid & (nth >= lengths.unsqueeze(-1) - recent)
    first = valid & ~newest & (nth < sink)
    # One unique number per token: the rule outweighs every value, and the value outweighs every index.
    rule = 3 * newest.long() + 2 * first.long()
    value = torch.where(newest, position, torch.where(first, 0, scores))
    if worst is not None and safeguard > 0:
        share = as_fraction(safeguard)
        places = wanted * share.numerator // share.denominator
        worst = worst.long().expand(*rows, -1)
        free = (valid & ~(newest | first)).expand(scores.shape).gather(-1, worst.clamp(min=0)) & (worst >= 0)
        order = free.cumsum(-1)
        guarded = torch.where(free & (order <= places.unsqueeze(-1)), worst, count)  # all others go to place `count`
        rule = _with(rule.expand(scores.shape), guarded, torch.ones_like(order))
        value = _with(value.long(), guarded, -order)
    best = _best(torch.where(valid, rule, -1), value, width)
    # Places beyond the row's own k become `count`, so that the sort moves them to the end, and then -1.
    chosen = torch.arange(width, device=device) < wanted.unsqueeze(-1)
    indices = torch.where(chosen, best, count).sort(-1).values
    return indices.masked_fill(indices == count, -1)


def check_forced(recent: int, sink: int, safeguard: float) -> None:
    """Raise `InputError` unless `select` accepts these values."""
    if recent < 0 or sink < 0 or not 0 <= safeguard <= 1:
        raise InputError(
            f"recent and sink must be 0 or more and safeguard in [0, 1], not {recent}, {sink} and {safeguard}"
        )


@functools.cache
def as_fraction(safeguard: float) -> Fraction:
    """Return the printed decimal as a fraction: integer products with it are exact on every device and below 2^63."""
    return Fraction(str(safeguard)).limit_denominator(1_000_000)


def worst_first(error: Tensor) -> Tensor:
    """Return the order of the safeguard's candidates: int32 `[..., N]`, largest error first, ties by index.

    Args:
        error: float32 `[..., N]`, as `encode` returns it.
    """
    return error.sort(dim=-1, descending=True, stable=True).indices.to(torch.int32)


def sortable(values: Tensor) -> Tensor:
    """Map floats `[..., N]` to int32 of the same order and ties, so that `select` accepts any real-valued scores."""
    # The bits of a float, read as an integer, keep its order once the bits of negative floats are inverted.
    bits = (values.float() + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _with(tensor: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """Return `tensor [..., N]` with `new` at `places`; place N is dropped."""
    return torch.nn.functional.pad(tensor, (0, 1)).scatter(-1, places, new)[..., :-1]


def _best(rule: Tensor, value: Tensor, k: int) -> Tensor:
    """Return the indices of the `k` largest entries of the last dimension, best first: by rule, value, lower index."""
    last = (1 << INDEX_BITS) - 1
    key = (((rule << 32) + value.long()) << INDEX_BITS) + (last - torch.arange(value.shape[-1], device=value.device))
    return key.topk(k, dim=-1).indices
