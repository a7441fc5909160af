"""Shares and means with their 95 % confidence intervals."""

import math
from collections.abc import Sequence

__all__ = ["mean", "proportion"]

Z = 1.96


def proportion(right: float, count: int) -> dict[str, float]:
    """Return the proportion `right / count` with Wilson's interval."""
    p = right / count
    middle = (p + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * math.sqrt(p * (1 - p) / count + Z * Z / (4 * count * count)) / (1 + Z * Z / count)
    return _figure(p, max(0.0, middle - half), min(1.0, middle + half))


def mean(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> dict[str, float]:
    """Return the mean of independent values with an interval of 1.96 standard errors to each side.

    `least` and `most` are the bounds of possible values and limit the interval. A single value shows no spread, so its
    interval has width 0.
    """
    count = len(values)
    middle = math.fsum(values) / count
    variance = math.fsum((value - middle) ** 2 for value in values) / max(1, count - 1)
    half = Z * math.sqrt(variance / count)
    return _figure(middle, max(least, middle - half), min(most, middle + half))


def _figure(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": round(value, 6), "low": round(low, 6), "high": round(high, 6)}
