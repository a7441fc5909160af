"""What Triton's language lacks: products that are right in the interpreter, too, IEEE division, rounding."""

import math

import torch
import triton
import triton.language as tl
from triton import knobs

from bpc_calib.method import encoded, scoring

__all__ = [
    "ASM",
    "COARSE",
    "FINE",
    "FINE_BITS",
    "FORCED",
    "GAIN_MAX",
    "GAIN_OFFSET",
    "GAIN_ONE",
    "GAIN_UNIT",
    "INT32_MAX",
    "INT32_MIN",
    "INTERPRET",
    "LARGEST_FACTOR",
    "LARGEST_LIMIT",
    "LARGEST_OCTAVE",
    "LARGEST_QUERY",
    "LARGEST_SCORE",
    "LEAST",
    "LN2",
    "NEVER",
    "OCTAVES",
    "RELATIVE_LIMIT",
    "ROUNDED_TWICE",
    "STRIPES",
    "THREE_PASSES",
    "divide",
    "dot",
    "fetch",
    "registers",
    "round_even",
]

# Read once, when the kernels are defined, as Triton does.
INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
# The assembly is NVIDIA's; elsewhere and in the interpreter, plain operations do the same.
ASM = tl.constexpr(not INTERPRET.value and torch.version.hip is None)
# float32 products on matrix units: each as three products of 10-bit fractions, nearly as exact.
THREE_PASSES = tl.constexpr("tf32x3" if torch.version.hip is None else "ieee")

# Passed at every launch, as Triton's default differs between its versions: a * b + c is rounded twice. So torch rounds,
# and codes are compared bit for bit; and fused, the lanes that share a sum may round it differently.
ROUNDED_TWICE = {"enable_fp_fusion": False}


def registers(most: int, *, limited: bool) -> dict[str, int]:
    """A launch's limit of registers per thread, for NVIDIA's compiler: its own guess may put a few of them aside."""
    return {"maxnreg": most} if limited and torch.version.hip is None else {}


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


GAIN_OFFSET = tl.constexpr(encoded.GAIN_OFFSET)
GAIN_UNIT = tl.constexpr(float(encoded.GAIN_UNIT))
GAIN_ONE = tl.constexpr(float(encoded.GAIN_ONE))
GAIN_MAX = tl.constexpr(float(encoded.GAIN_MAX))
LARGEST_FACTOR = tl.constexpr(encoded.GAIN_MAX + encoded.GAIN_OFFSET)  # the largest that a gain multiplies a score by
LARGEST_QUERY = tl.constexpr(scoring.LARGEST_QUERY)
LARGEST_SCORE = tl.constexpr(scoring.LARGEST_SCORE)
RELATIVE_LIMIT = tl.constexpr(scoring.RELATIVE_LIMIT)
LARGEST_LIMIT = tl.constexpr(float(scoring.LARGEST_LIMIT))
LARGEST_OCTAVE = tl.constexpr(float(scoring.LARGEST_OCTAVE))
STRIPES = tl.constexpr(scoring.STRIPES)
OCTAVES = tl.constexpr(scoring.OCTAVES)
LEAST = tl.constexpr(scoring.LEAST)
LN2 = tl.constexpr(math.log(2))

INT32_MIN = tl.constexpr(-(1 << 31))
INT32_MAX = tl.constexpr((1 << 31) - 1)
FORCED = INT32_MAX  # in place of a score: attended whatever its rank
NEVER = INT32_MIN  # in place of a score: padding

COARSE = tl.constexpr(256)  # bins of the first histogram: a size to tune on a GPU, which changes no result
FINE_BITS = tl.constexpr(8)  # the lowest bits of a score, which the last histogram counts
FINE = tl.constexpr(1 << FINE_BITS.value)  # bins of the last histogram
