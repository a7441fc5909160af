"""Rows as float32 whose element type a kernel learns from a number: it is compiled once for all types."""

import numpy as np

from bpc_calib.backends.cpu.compiling import inlined
from bpc_calib.backends.cpu.language import at, float_of, widen

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "element_size", "widen_row"]

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2

F32, U16, I16 = (np.empty(0, kind) for kind in (np.float32, np.uint16, np.int16))  # see `language`


@inlined
def element_size(element):
    """Bytes of an element."""
    return 4 if element == FLOAT32 else 2


@inlined
def from_half(number):
    """float32 of a float16 as int16, by its bits: LLVM's conversion needs a function where a CPU has no instruction."""
    bits = np.int32(number)
    wide = np.int32(bits & 0x7FFF) << np.int32(13)  # exponent and fraction in their places, the exponent 112 too small
    positive = float_of(np.int32(wide)) * np.float32(2.0**112)
    if wide >= 0x0F800000:  # infinity and NaN
        positive = float_of(np.int32(wide | 0x7F800000))
    return -positive if bits < 0 else positive


@inlined
def widen_row(address, element, out):
    """Write the contiguous row at an address to the float32 `out`, which has its length."""
    if element == FLOAT32:
        out[:] = at(address, len(out), F32)
    elif element == BFLOAT16:
        bfloat = at(address, len(out), U16)
        for i in range(len(out)):
            out[i] = widen(bfloat[i])
    else:
        half = at(address, len(out), I16)
        for i in range(len(out)):
            out[i] = from_half(half[i])
