"""The set of tokens attended: forced ones first, then the best ranked."""

import functools
from fractions import Fraction
from numbers import Integral

import torch
from torch import Tensor

from bpc_calib.errors import InputError

__all__ = ["as_fraction", "attended", "check_forced", "select", "sortable", "worst_first"]

# A token's rule, value and index share one int64: at most 2, 32 and these bits.
INDEX_BITS = 28


def attended(length: int, budget: float | int, min_tokens: int = 128) -> int:
    """`k = min(N, max(min_tokens, b))`, `b = floor(budget * N)` for a float, `b = budget` for an int.

    A float is a share in (0, 1] and is read as the decimal it prints as, so 0.29 of 100 is 29; an int
    is a number of tokens, so 1 means one token and 1.0 all of them.

    Raises:
        InputError: a budget out of range.
    """
    is_count = isinstance(budget, Integral) and not isinstance(budget, bool)
    if not (is_count or isinstance(budget, float)) or not budget > 0 or (not is_count and budget > 1):
        raise InputError(f"budget must be a share in (0, 1] or a positive number of tokens, not {budget!r}")
    if is_count:
        return min(length, max(min_tokens, int(budget)))
    share = _decimal(float(budget))
    return min(length, max(min_tokens, length * share.numerator // share.denominator))


@functools.cache
def _decimal(share: float) -> Fraction:
    return Fraction(str(share))


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

    In this order of right, each skipping what is already in: the newest `recent`, the first `sink`,
    `floor(safeguard * k)` of those that `worst` lists first, then the best scores. Ties go to the lower index.
    Where the forced ones exceed `k`, the earlier rule wins and `k` holds.

    Args:
        scores: integers that fit int32 `[..., N]`, one row a KV head (already reduced over its group).
        k: how many, at most the number of valid tokens; or int64 `[...]`, one a row. Rows shorter than
            the longest end in -1.
        valid: bool `[..., N]`; False is padding: never selected, and not counted by `recent` and `sink`.
        worst: integers `[..., L]`, the tokens that the safeguard draws from, in its order, none twice
            (`worst_first`); -1 is none.
        safeguard: share of `k` in [0, 1] that it may take.

    Raises:
        InputError: arguments out of range, or more tokens asked for than there are.
    """
    if scores.dtype.is_floating_point or scores.dim() < 1:
        raise InputError(f"scores must be integers [..., N], not {scores.dtype} {list(scores.shape)}")
    if scores.dtype == torch.int64 and (scores.abs() >= 1 << 31).any():
        raise InputError("scores must fit int32")
    check_forced(recent, sink, safeguard)
    rows, count = scores.shape[:-1], scores.shape[-1]
    device = scores.device
    if count >= 1 << INDEX_BITS:
        raise InputError(f"select serves fewer than {1 << INDEX_BITS:,} tokens, not {count:,}")
    wanted = torch.as_tensor(k, device=device).expand(rows)
    position = torch.arange(count, device=device)
    if valid is None:
        lengths, nth = torch.full(rows, count, device=device), position
        valid = torch.ones((), dtype=torch.bool, device=device)
    else:
        valid = valid.expand(scores.shape)
        lengths, nth = valid.sum(-1), valid.cumsum(-1) - 1  # the place of each token among those of its row
    if (wanted < 0).any() or (wanted > lengths).any():
        raise InputError("k must be between 0 and the number of valid tokens")
    width = int(wanted.max()) if wanted.numel() else 0

    newest = valid & (nth >= lengths.unsqueeze(-1) - recent)
    first = valid & ~newest & (nth < sink)
    # One number a token, all different: its rule outweighs every value, and the value every index.
    rule = 3 * newest.long() + 2 * first.long()
    value = torch.where(newest, position, torch.where(first, 0, scores))
    if worst is not None and safeguard > 0:
        share = as_fraction(safeguard)
        places = wanted * share.numerator // share.denominator
        worst = worst.long().expand(*rows, -1)
        free = (valid & ~(newest | first)).expand(scores.shape).gather(-1, worst.clamp(min=0)) & (worst >= 0)
        order = free.cumsum(-1)
        guarded = torch.where(free & (order <= places.unsqueeze(-1)), worst, count)  # a place more, for all others
        rule = _with(rule.expand(scores.shape), guarded, torch.ones_like(order))
        value = _with(value.long(), guarded, -order)
    best = _best(torch.where(valid, rule, -1), value, width)
    # Places beyond the row's own k go to the end, as `count`, and become -1 there.
    chosen = torch.arange(width, device=device) < wanted.unsqueeze(-1)
    indices = torch.where(chosen, best, count).sort(-1).values
    return indices.masked_fill(indices == count, -1)


def check_forced(recent: int, sink: int, safeguard: float) -> None:
    """Raise `InputError` unless `select` takes these."""
    if recent < 0 or sink < 0 or not 0 <= safeguard <= 1:
        raise InputError(
            f"recent and sink must be 0 or more and safeguard in [0, 1], not {recent}, {sink} and {safeguard}"
        )


@functools.cache
def as_fraction(safeguard: float) -> Fraction:
    """The decimal that it prints as: multiplied in integers it is as exact on every device, and below 2^63."""
    return Fraction(str(safeguard)).limit_denominator(1_000_000)


def worst_first(error: Tensor) -> Tensor:
    """The order in which the safeguard takes tokens: int32 `[..., N]`, the largest error first, ties by index.

    Args:
        error: float32 `[..., N]`, as `encode` gives it.
    """
    return error.sort(dim=-1, descending=True, stable=True).indices.to(torch.int32)


def sortable(values: Tensor) -> Tensor:
    """int32 in the order of floats, equal where these are equal, so that any real ranking can be selected from."""
    # The bits of a float, read as an integer, are in its order once those of a negative one are turned over.
    bits = (values.float() + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _with(tensor: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """`tensor [..., N]` with `new` at `places`; place N is nowhere."""
    return torch.nn.functional.pad(tensor, (0, 1)).scatter(-1, places, new)[..., :-1]


def _best(rule: Tensor, value: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest along the last dimension, by rule, then value, then the lower index; best first."""
    last = (1 << INDEX_BITS) - 1
    key = (((rule << 32) + value.long()) << INDEX_BITS) + (last - torch.arange(value.shape[-1], device=value.device))
    return key.topk(k, dim=-1).indices
