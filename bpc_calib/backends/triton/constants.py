"""Numbers of the method and of ranked scores, as constants that kernels can read."""

import triton.language as tl

from bpc_calib.method import encoded, scoring

__all__ = [
    "COARSE", "FINE", "FINE_BITS", "FORCED", "GAIN_MAX", "GAIN_OFFSET", "GAIN_ONE", "GAIN_UNIT",
    "INT32_MAX", "INT32_MIN", "LARGEST_FACTOR", "LARGEST_LIMIT", "LARGEST_QUERY", "NEVER",
    "RELATIVE_LIMIT",
]  # fmt: skip

GAIN_OFFSET = tl.constexpr(encoded.GAIN_OFFSET)
GAIN_UNIT = tl.constexpr(float(encoded.GAIN_UNIT))
GAIN_ONE = tl.constexpr(float(encoded.GAIN_ONE))
GAIN_MAX = tl.constexpr(float(encoded.GAIN_MAX))
LARGEST_FACTOR = tl.constexpr(encoded.GAIN_MAX + encoded.GAIN_OFFSET)  # the largest that a gain multiplies a score by
LARGEST_QUERY = tl.constexpr(scoring.LARGEST_QUERY)
RELATIVE_LIMIT = tl.constexpr(scoring.RELATIVE_LIMIT)
LARGEST_LIMIT = tl.constexpr(float(scoring.LARGEST_LIMIT))

INT32_MIN = tl.constexpr(-(1 << 31))
INT32_MAX = tl.constexpr((1 << 31) - 1)
FORCED = INT32_MAX  # in place of a score: attended whatever its rank
NEVER = INT32_MIN  # in place of a score: padding

COARSE = tl.constexpr(256)  # bins of the first histogram: a size to tune on a GPU, which changes no result
FINE_BITS = tl.constexpr(8)  # the lowest bits of a score, which the last histogram counts
FINE = tl.constexpr(1 << FINE_BITS.value)  # bins of the last histogram
