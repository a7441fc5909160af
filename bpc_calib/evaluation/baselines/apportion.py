"""Divide a number of tokens by weights."""

from collections.abc import Sequence

__all__ = ["apportion"]


def apportion(total: int, weights: Sequence[float], least: int, most: int) -> list[int]:
    """Return whole numbers that add up to `total`: `least` each, and the rest in proportion to the weights.

    What `most` cuts off, and what rounding down leaves, goes one by one to those below `most`, in rounds that begin
    with the largest remainders; ties go to the larger weight, then to the lower index. So a larger weight never gets
    less.

    Args:
        total: between `least` and `most` times the number of weights.
        weights: finite, 0 or more; all alike if their sum is 0.
        least, most: bounds of each number.
    """
    whole = sum(weights)
    rest = total - least * len(weights)
    exact = [rest * weight / whole if whole else rest / len(weights) for weight in weights]
    given = [min(most, least + int(each)) for each in exact]
    order = sorted(range(len(weights)), key=lambda i: (int(exact[i]) - exact[i], -weights[i]))
    while left := total - sum(given):
        below = [i for i in order if given[i] < most]
        rounds = max(1, min(left // len(below), most - max(given[i] for i in below)))
        for i in below[:left]:
            given[i] += rounds
    return given
