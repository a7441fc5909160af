"""Shares of a budget by KV head: more for a head that loses more without it, the same mean over all heads.

A head's need is its loss at each share of the tokens in `GRID`. On the lower convex hull of every need, the tokens that
save most go first, until the mean is spent: the least sum of losses. LU-KV allots the tokens it evicts in this way.

Without torch, so that `bpc inspect` starts fast; `spread` in `method/rules.py` has the same numbers on a device.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "GRID", "LEAST", "LEVELS", "LONG_FROM", "SHORT", "UNIT", "Shares", "counts", "loss", "most", "rounded", "share_out",
    "shares_at",
]  # fmt: skip

GRID = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.012, 0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.22, 0.33, 0.5, 1.0)
LEAST = 16  # tokens of every head, or the mean if that is lower; shares are of what is left
FLOOR = 8  # no share is below that of an equal one over this
LEVELS = 21  # means for which shares are found: level i for means from 2^-(i + 1)/2 to 2^-i/2 of the tokens
SHORT, LONG_FROM = 2048, 4096  # below `LONG_FROM` tokens, shares follow from what heads need on `SHORT` tokens
LONG = 1 << 20  # tokens of a context so long that rounding counts for nothing
UNIT = 1024  # the share of a head that attends to as many tokens as the mean of all heads

T = TypeVar("T", int, Any)
Needs = Mapping[int, NDArray[np.float32]]
# [2 LEVELS][H_KV], in UNIT: for contexts of `LONG_FROM` and more tokens, then for shorter ones.
Shares = tuple[tuple[int, ...], ...]


def share_out(needs: Needs, short: Needs | None = None) -> dict[int, Shares]:
    """Return the shares of the KV heads of each layer that minimise the sum of losses.

    Args:
        needs: by layer, float32 `[H_KV, len(GRID)]`: what is lost where a head attends to a share of the tokens.
        short: the same for contexts of fewer than `LONG_FROM` tokens; None: `needs` serve them, too.
    """
    long = _levels(needs)
    below = long if short is None else _levels(short)
    split = np.cumsum([len(each) for each in needs.values()])[:-1]
    by_layer = np.split(np.concatenate([long, below]), split, axis=1)
    return {layer: tuple(map(tuple, each.tolist())) for layer, each in zip(needs, by_layer, strict=True)}


def _levels(needs: Needs) -> NDArray[np.int64]:
    """Return the shares of all heads, `[LEVELS, heads]` in `UNIT`."""
    heads = np.concatenate([each.astype(np.float64) for each in needs.values()])
    parts = [(slope, head, begin, end) for head, need in enumerate(heads) for slope, begin, end in _hull(need)]
    parts.sort()  # those that save most first; ties by head
    owner, begin, end = (np.array([part[i] for part in parts]) for i in (1, 2, 3))
    levels = []
    for level in range(LEVELS):
        mean = max(GRID[0], 2 ** -((level + 0.5) / 2))
        least = max(GRID[0], mean / FLOOR)
        width = (end - begin.clip(least)).clip(0)
        taken = (len(heads) * (mean - least) - (width.cumsum() - width)).clip(0, width)
        share = least + np.bincount(owner, taken, len(heads))
        levels.append(np.round(share / mean * UNIT).astype(np.int64))
    return np.stack(levels)


def _hull(need: NDArray[np.float64]) -> list[tuple[float, float, float]]:
    """Return the pieces of the lower convex hull of a need: slope, first and last share."""
    corners: list[tuple[float, float]] = []
    for share, loss in zip(GRID, need.tolist(), strict=True):
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], (share, loss)):
            corners.pop()
        corners.append((share, loss))
    return [(_slope(one, two), one[0], two[0]) for one, two in itertools.pairwise(corners)]


def _slope(one: tuple[float, float], two: tuple[float, float]) -> float:
    return (two[1] - one[1]) / (two[0] - one[0])


def counts(mean: int, length: int, shares: Shares) -> tuple[int, ...]:
    """Return how many of `length` tokens each KV head attends to, where the mean of all heads is `mean`."""
    if mean >= length:
        return (length,) * len(shares[0])
    row = min(LEVELS, (length * length // (mean * mean)).bit_length()) - 1 + LEVELS * (length < LONG_FROM)
    least = min(LEAST, mean)
    return tuple(min(length, least + rounded((mean - least) * share)) for share in shares[row])


def rounded(count: T) -> T:
    """Return numbers of tokens in `UNIT` as whole tokens."""
    return (count + UNIT // 2) // UNIT


def shares_at(shares: Mapping[int, Shares], budget: float, length: int = LONG) -> dict[int, NDArray[np.float64]]:
    """Return the share of the tokens of a context that each KV head attends to, `[H_KV]` by layer."""
    mean = max(1, int(budget * length))
    return {layer: np.array(counts(mean, length, each)) / length for layer, each in shares.items()}


def loss(needs: Needs, shares: Mapping[int, NDArray[np.float64]]) -> float:
    """Return the sum of what KV heads lose that attend to these shares of the tokens; between those of `GRID`, a line.

    Args:
        needs: as in `share_out`.
        shares: by layer, `[H_KV]`.
    """
    pairs = [pair for layer, each in shares.items() for pair in zip(each, needs[layer], strict=True)]
    return float(sum(np.interp(share, GRID, need) for share, need in pairs))


def most(mean: int, length: int, shares: Sequence[Sequence[int]]) -> int:
    """Return a bound of `counts` for all lengths up to `length` and all means up to `mean`."""
    found = []
    for row, some in enumerate(shares):
        longest = min(length, LONG_FROM - 1) if row >= LEVELS else length
        each = min(mean, int(longest * 2 ** (-(row % LEVELS) / 2)) + 1)
        least = min(LEAST, each)
        found.append(least + rounded((each - least) * max(some)))
    return min(length, max(found))
