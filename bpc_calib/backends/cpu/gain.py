"""The error and the gain of a key from its squared norm, what is left of it, and its product with its code."""

import numpy as np

from bpc_calib.backends.cpu.compiling import inlined
from bpc_calib.backends.cpu.constants import GAIN_MAX, GAIN_OFFSET, GAIN_ONE, GAIN_UNIT

__all__ = ["error_of", "gain_of"]


@inlined
def error_of(left):
    """The error, float32, of a squared error that rounding may have made negative."""
    return np.float32(np.sqrt(np.float64(max(left, np.float32(0)))))


@inlined
def gain_of(norm, dot):
    """`bpc_calib.method.encoded.gain_byte`."""
    byte = np.float32(GAIN_MAX)
    if norm <= 0:
        byte = np.float32(GAIN_ONE)
    elif dot > 0:
        byte = np.rint(np.float32(GAIN_UNIT) * norm / dot - np.float32(GAIN_OFFSET))
    return np.uint8(min(np.float32(GAIN_MAX), max(np.float32(0), byte)))
