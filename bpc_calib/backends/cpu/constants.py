"""The constants of the method as kernels read them: numba takes the type of a global from its dtype."""

import numpy as np

from bpc_calib.method import encoded, scoring

__all__ = [
    "GAIN_MAX",
    "GAIN_OFFSET",
    "GAIN_ONE",
    "GAIN_UNIT",
    "LARGEST_LIMIT",
    "LARGEST_QUERY",
    "MAGNITUDE_BITS",
    "RELATIVE_LIMIT",
]

GAIN_MAX, GAIN_OFFSET, GAIN_ONE, GAIN_UNIT = (
    np.int32(each) for each in (encoded.GAIN_MAX, encoded.GAIN_OFFSET, encoded.GAIN_ONE, encoded.GAIN_UNIT)
)
RELATIVE_LIMIT, LARGEST_LIMIT, LARGEST_QUERY = (
    np.float32(each) for each in (scoring.RELATIVE_LIMIT, scoring.LARGEST_LIMIT, scoring.LARGEST_QUERY)
)
MAGNITUDE_BITS = scoring.LARGEST_QUERY.bit_length()  # of the absolute values of a rounded query
