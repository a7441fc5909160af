"""The set of tokens attended: forced ones first, then the best ranked."""

from fractions import Fraction
from numbers import Integral

import torch
from torch import Tensor

from bpc_calib.errors import InputError

__all__ = ["attended", "select"]


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
    wanted = int(budget) if is_count else int(_exact(float(budget)) * length)
    return min(length, max(min_tokens, wanted))


def select(
    scores: Tensor,
    k: int | Tensor,
    *,
    valid: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    error: Tensor | None = None,
    safeguard: float = 0.0,
) -> Tensor:
    """Choose `k` tokens for each row of `scores`: ascending indices, int64 `[..., k]`.

    In this order of right, each skipping what is already in: the newest `recent`, the first `sink`,
    `floor(safeguard * k)` by largest `error`, then the best scores. Ties go to the lower index. Where
    the forced ones exceed `k`, the earlier rule wins and `k` holds.

    Args:
        scores: integer `[..., N]`, one row a KV head (already reduced over its group).
        k: how many, at most the number of valid tokens; or int64 `[...]`, one a row. Rows shorter than
            the longest end in -1.
        valid: bool `[..., N]`; False is padding: never selected, and not counted by `recent` and `sink`.
        error: float `[..., N]`; a token of error `-inf` does not enter the safeguard.
        safeguard: share of `k` in [0, 1] that the safeguard may take.

    Raises:
        InputError: arguments out of range, or more tokens asked for than there are.
    """
    if scores.dtype.is_floating_point or scores.dim() < 1:
        raise InputError(f"scores must be integers [..., N], not {scores.dtype} {list(scores.shape)}")
    if recent < 0 or sink < 0 or not 0 <= safeguard <= 1:
        raise InputError(
            f"recent and sink must be 0 or more and safeguard in [0, 1], not {recent}, {sink} and {safeguard}"
        )
    rows, count = scores.shape[:-1], scores.shape[-1]
    device = scores.device
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.expand(scores.shape)
    wanted = torch.as_tensor(k, device=device).expand(rows)
    if (wanted < 0).any() or (wanted > valid.sum(-1)).any():
        raise InputError("k must be between 0 and the number of valid tokens")

    nth = valid.cumsum(-1) - 1  # the place of each token among the valid ones of its row
    newest = valid & (nth >= valid.sum(-1, keepdim=True) - recent)
    first = valid & ~newest & (nth < sink)
    position = torch.arange(count, device=device).expand(scores.shape)
    # One sort by (rule, value): a rule outweighs every value, and a stable sort keeps ties in order.
    value = torch.where(newest, position, torch.where(first, 0, scores.to(torch.int64)))
    guarded = torch.zeros_like(valid)
    if error is not None and safeguard > 0:
        share = _exact(safeguard)
        places = wanted * share.numerator // share.denominator
        candidates = error.expand(scores.shape).masked_fill(newest | first | ~valid, -torch.inf)
        rank = _rank(candidates)
        guarded = (rank < places.unsqueeze(-1)) & (candidates > -torch.inf)
        value = torch.where(guarded, -rank, value)
    rule = 3 * newest.long() + 2 * first.long() + guarded.long() - (~valid).long()
    chosen = _rank(rule * (1 << 40) + value) < wanted.unsqueeze(-1)

    width = int(wanted.max()) if wanted.numel() else 0
    # Tokens not chosen go to the end, as `count`, and become -1 there.
    indices = torch.where(chosen, position, count).sort(-1).values[..., :width]
    return indices.masked_fill(indices == count, -1)


def _rank(values: Tensor) -> Tensor:
    """The place of each value in descending order along the last dimension; ties to the lower index."""
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    places = torch.arange(values.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _exact(share: float) -> Fraction:
    """The decimal that a float prints as, so that shares multiply in integers on every device."""
    return Fraction(str(share)).limit_denominator(1_000_000)
