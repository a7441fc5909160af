"""Which tokens a row (a KV head of a sequence) has, and how many of them are chosen."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Limits", "counted", "length_of", "number_of"]


class Limits(NamedTuple):
    """Which tokens there are, how many are chosen, and which of them always."""

    lengths: Any  # integers [B]; None: all `length`
    lengths_b: int
    ks: Any  # integers [B, H_KV]; None: `k` for all
    ks_b: int
    ks_h: int
    valid: Any  # bool [B, N]; None: no padding
    valid_b: int
    valid_n: int
    bounds: Any  # int32 [B, H_KV, 3]: real tokens, where the newest of them begin, where the first of them end
    recent: int
    sink: int
    numerator: int  # the safeguard's share of k, as a fraction
    denominator: int


@triton.jit
def length_of(limits: Limits, b, length):
    """How many tokens of a sequence are in use, of `length` that there is room for."""
    if limits.lengths is not None:
        length = tl.maximum(tl.minimum(tl.load(limits.lengths + b * limits.lengths_b).to(tl.int32), length), 0)
    return length


@triton.jit
def number_of(limits: Limits, b, h, k):
    """How many tokens a KV head chooses; `k` where all choose alike."""
    if limits.ks is not None:
        k = tl.load(limits.ks + b * limits.ks_b + h * limits.ks_h).to(tl.int32)
    return k


@triton.jit
def counted(limits: Limits, b, at, length):
    """Which tokens are real."""
    inside = at < length
    if limits.valid is not None:
        own = limits.valid + b * limits.valid_b
        inside = inside & (tl.load(own + at.to(tl.int64) * limits.valid_n, mask=inside, other=0) != 0)
    return inside
