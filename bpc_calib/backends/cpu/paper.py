"""The paper's scores by popcounts, to compare with: whole vectors where the machine counts ones in them."""

import numba
import numpy as np
import torch
from torch import Tensor

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.constants import MAGNITUDE_BITS
from bpc_calib.backends.cpu.language import at, ones
from bpc_calib.backends.cpu.threads import parts, run

__all__ = ["popcount_scores"]

BLOCK = 1024  # keys whose best scores are in the nearest cache
I8, I32, I64 = (np.empty(0, kind) for kind in (np.int8, np.int32, np.int64))


@inlined
def score_row(values, codes, scores, heads, count):
    """The largest of `c = 2 sum_j 2^j popc(m_j & ~(s ^ h)) - sum|p|`: half the popcounts of the printed form."""
    planes = np.zeros((heads, MAGNITUDE_BITS), np.uint64)
    signs, sums = np.zeros(heads, np.uint64), np.zeros(heads, np.int64)
    for g in range(heads):
        for i in range(64):
            value = np.int64(values[64 * g + i])
            sums[g] += abs(value)
            if value < 0:  # 1 where negative: XOR with the code's bits is then 1 where the signs agree
                signs[g] |= np.uint64(1) << np.uint64(i)
            for j in range(MAGNITUDE_BITS):
                planes[g, j] |= np.uint64((abs(value) >> j) & 1) << np.uint64(i)
    for begin in range(0, count, BLOCK):
        end = min(count, begin + BLOCK)
        for g in range(heads):
            a, b, c, d, e, f, h = planes[g]
            sign, whole = signs[g], sums[g]
            for i in range(begin, end):
                agree = np.uint64(codes[i]) ^ sign
                total = ones(agree & h)
                total = 2 * total + ones(agree & f)
                total = 2 * total + ones(agree & e)
                total = 2 * total + ones(agree & d)
                total = 2 * total + ones(agree & c)
                total = 2 * total + ones(agree & b)
                total = 2 * total + ones(agree & a)
                score = np.int32(2 * total - whole)
                scores[i] = score if g == 0 else max(score, scores[i])


@compiled(parallel=True)
def popcount_kernel(values, codes, codes_b, codes_h, scores, rows, kv_heads, heads, tokens, parts):
    """int32 `[rows, tokens]`."""
    size = (tokens + parts - 1) // parts
    for index in numba.prange(rows * parts):
        row, first = np.int64(index) // parts, np.int64(index) % parts * size
        count = max(0, min(size, tokens - first))
        score_row(
            at(values + row * heads * 64, heads * 64, I8),
            at(codes + 8 * (row // kv_heads * codes_b + row % kv_heads * codes_h + first), count, I64),
            at(scores + 4 * (row * tokens + first), count, I32), heads, count,
        )  # fmt: skip


def popcount_scores(values: Tensor, codes: Tensor) -> Tensor:
    """`hash_scores(...).amax(-2)`, int32 `[B, H_KV, N]`, of int8 `[B, H_KV, G, 64]` and codes `[B, H_KV, N, 1]`."""
    batch, kv_heads, heads, bits = values.shape
    tokens, rows = codes.shape[2], batch * kv_heads
    if bits != 64 or codes.shape[-1] != 1:
        raise ValueError(f"the paper's codes have 64 bits, not {bits}")
    if codes.stride(2) != 1:
        codes = codes.contiguous()
    values, scores = values.contiguous(), torch.empty(batch, kv_heads, tokens, dtype=torch.int32)
    run(
        popcount_kernel, values.data_ptr(), codes.data_ptr(), *codes.stride()[:2], scores.data_ptr(), rows, kv_heads,
        heads, tokens, parts(rows, tokens),
    )  # fmt: skip
    return scores
