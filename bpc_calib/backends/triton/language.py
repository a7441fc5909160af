"""What Triton's language needs around it: products that the interpreter gets right, IEEE division, rounding."""

import torch
import triton
import triton.language as tl
from triton import knobs

__all__ = ["ASM", "INTERPRET", "THREE_PASSES", "divide", "dot", "round_even"]

# Read once, when the kernels are defined: Triton decides then, too.
INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
# The assembly is NVIDIA's. A plain path does the same elsewhere, and in the interpreter.
ASM = tl.constexpr(not INTERPRET.value and torch.version.hip is None)
# float32 products on matrix units: each as three of 10-bit fractions, so nearly as exact.
THREE_PASSES = tl.constexpr("tf32x3" if torch.version.hip is None else "ieee")


@triton.jit
def dot(a, b):
    """`a @ b` of floats, summed in float32, or in float64 for float64."""
    # The interpreter multiplies the raw bits of 16-bit floats.
    if INTERPRET and a.dtype != tl.float64:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.float64:
        return tl.dot(a, b, out_dtype=tl.float64)
    else:
        return tl.dot(a, b, input_precision=THREE_PASSES)


@triton.jit
def divide(a, b):
    """`a / b` rounded as IEEE says, which `/` is not for float32."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def round_even(x):
    """The nearest integer, half to even, of floats of at most 2^22 in absolute value."""
    # 1.5 * 2^23 and 1.5 * 2^52: at that size the spacing of floats is 1.
    if x.dtype == tl.float64:
        return (x + 6755399441055744.0) - 6755399441055744.0
    else:
        return (x + 12582912.0) - 12582912.0
