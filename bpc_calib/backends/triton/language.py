"""What Triton's language lacks: products that are right in the interpreter, too, IEEE division, rounding."""

import torch
import triton
import triton.language as tl
from triton import knobs

__all__ = ["ASM", "INTERPRET", "ROUNDED_TWICE", "THREE_PASSES", "divide", "dot", "fetch", "round_even"]

# Read once, when the kernels are defined, as Triton does.
INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
# The assembly is NVIDIA's; elsewhere and in the interpreter, plain operations do the same.
ASM = tl.constexpr(not INTERPRET.value and torch.version.hip is None)
# float32 products on matrix units: each as three products of 10-bit fractions, nearly as exact.
THREE_PASSES = tl.constexpr("tf32x3" if torch.version.hip is None else "ieee")

# Passed at every launch, as Triton's default differs between its versions: a * b + c is rounded twice. So torch rounds,
# and codes are compared bit for bit; and fused, the lanes that share a sum may round it differently.
ROUNDED_TWICE = {"enable_fp_fusion": False}


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
    """`a / b`, rounded correctly; Triton's `/` of float32 is not."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def round_even(x):
    """The nearest integer, half to even, of floats of at most 2^22 in absolute value."""
    # Adds 1.5 * 2^23 or 1.5 * 2^52: floats of that size are 1 apart.
    if x.dtype == tl.float64:
        return (x + 6755399441055744.0) - 6755399441055744.0
    else:
        return (x + 12582912.0) - 12582912.0


@triton.jit
def fetch(start, BYTES: tl.constexpr):
    """Brings memory near that will be read soon, in pieces: `BYTES` from the pointer `start` on."""
    if ASM:
        line = start.to(tl.int64) + tl.arange(0, BYTES // 128) * 128
        tl.inline_asm_elementwise(
            "{ prefetch.global.L1 [$1]; mov.b32 $0, 0; }", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
        )
