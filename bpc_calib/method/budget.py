"""A budget: how many tokens a decoding step attends to."""

import functools
from fractions import Fraction
from numbers import Integral

from bpc_calib.errors import InputError
from bpc_calib.method.defaults import MIN_TOKENS

__all__ = ["attended"]


def attended(length: int, budget: float | int, min_tokens: int = MIN_TOKENS) -> int:
    """Return `k = min(N, max(min_tokens, b))`: `b = floor(budget * N)` for a float, `b = budget` for an int.

    A float is a share in (0, 1]. Its printed decimal counts, so 0.29 of 100 is 29. An int is a number of
    tokens, so 1 means one token and 1.0 means all tokens.

    Raises:
        InputError: the budget is out of range.
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
