"""The paper's scores by popcount, to compare with: without the gain, and the largest of each group of heads.

Nothing decodes with them: `bpc bench` and `make gpu` time them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bpc_calib.backends.triton.language import ROUNDED_TWICE

__all__ = ["popcount_scores"]

PLANES = 7  # bits of a magnitude of at most 127
BLOCK = 1024  # keys a program scores


@triton.jit
def planes_kernel(values, planes, BITS: tl.constexpr, PLANES: tl.constexpr):
    """`planes [rows, PLANES + 2, 2]` of `values [rows, 64]`: bits of the magnitudes, signs, their sum; grid (rows)."""
    row = tl.program_id(0)
    word = tl.arange(0, 2)
    bit = tl.arange(0, 32)
    value = tl.load(values + row * BITS + word[:, None] * 32 + bit[None, :]).to(tl.int32)
    size = tl.abs(value)
    planes += row * (2 * PLANES + 4)
    for j in tl.static_range(PLANES):
        tl.store(planes + 2 * j + word, tl.sum(((size >> j) & 1) << bit[None, :], 1))
    # 1 where negative: XOR with the code's bits is then 1 where the signs agree.
    tl.store(planes + 2 * PLANES + word, tl.sum((value < 0).to(tl.int32) << bit[None, :], 1))
    tl.store(planes + 2 * PLANES + 2, tl.sum(tl.sum(size, 1), 0))


@triton.jit
def popcount(x):
    """Ones in each uint32, in the form that LLVM knows to be one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def popcount_kernel(
    planes, codes, scores, n, codes_b, codes_h, codes_n,
    H_KV: tl.constexpr, G: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`scores [rows, n]`: grid (blocks of keys, rows).

    `c = 2 sum_j 2^j popc(m_j & ~(s ^ h)) - sum|p|`, half the popcounts of the printed form; the largest of the group.
    """
    row = tl.program_id(1)
    b = (row // H_KV).to(tl.int64)
    h = (row % H_KV).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + b * codes_b + h * codes_h + at.to(tl.int64) * codes_n, mask=at < n, other=0)
    low = code.to(tl.int32).to(tl.uint32, bitcast=True)
    high = (code >> 32).to(tl.int32).to(tl.uint32, bitcast=True)
    best = tl.full([BLOCK], -(1 << 31), tl.int32)
    for head in tl.static_range(G):
        words = planes + (row * G + head) * (2 * PLANES + 4)
        agree_low = low ^ tl.load(words + 2 * PLANES).to(tl.uint32, bitcast=True)
        agree_high = high ^ tl.load(words + 2 * PLANES + 1).to(tl.uint32, bitcast=True)
        sum_of_agreeing = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(PLANES):
            plane = words + 2 * (PLANES - 1 - i)  # from the highest, which is doubled most often
            ones = popcount(agree_low & tl.load(plane).to(tl.uint32, bitcast=True))
            ones += popcount(agree_high & tl.load(plane + 1).to(tl.uint32, bitcast=True))
            sum_of_agreeing = 2 * sum_of_agreeing + ones
        best = tl.maximum(best, 2 * sum_of_agreeing - tl.load(words + 2 * PLANES + 2))
    tl.store(scores + row.to(tl.int64) * n + at, best, mask=at < n)


def popcount_scores(values: Tensor, codes: Tensor) -> Tensor:
    """`hash_scores(...).amax(-2)`, int32 `[B, H_KV, N]`, of int8 `[B, H_KV, G, 64]` and codes `[B, H_KV, N, 1]`."""
    batch, kv_heads, heads, bits = values.shape
    tokens, rows = codes.shape[2], batch * kv_heads
    if bits != 64 or codes.shape[-1] != 1:
        raise ValueError(f"the paper's codes have 64 bits, not {bits}")
    planes = torch.empty(rows, heads, PLANES + 2, 2, dtype=torch.int32, device=codes.device)
    scores = torch.empty(batch, kv_heads, tokens, dtype=torch.int32, device=codes.device)
    planes_kernel[(rows * heads,)](values.contiguous(), planes, BITS=bits, PLANES=PLANES, num_warps=1, **ROUNDED_TWICE)
    popcount_kernel[(triton.cdiv(tokens, BLOCK), rows)](
        planes, codes, scores, tokens, *codes.stride()[:3],
        H_KV=kv_heads, G=heads, PLANES=PLANES, BLOCK=BLOCK, num_warps=4, **ROUNDED_TWICE,
    )  # fmt: skip
    return scores
