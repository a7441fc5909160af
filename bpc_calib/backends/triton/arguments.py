"""A tensor and its strides as one argument of a kernel, and where its tokens lie."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Strided", "head_of", "in_pages", "strided", "token_at"]


class Strided(NamedTuple):
    """A tensor `[B, H_KV, N, ...]` and its first three strides; in a kernel `at` is a pointer.

    With a table it is `[pages, H_KV, size, ...]`: token `n` of sequence `b` lies in page `table[b, n // size]`.
    """

    at: Tensor | None
    b: int
    h: int
    n: int
    table: Tensor | None = None  # int32 [B, P]
    table_b: int = 0


@triton.jit
def head_of(x: Strided, b, h):
    """Where the tokens of a KV head of a sequence begin, or those of all pages."""
    if x.table is None:
        return x.at + b * x.b + h * x.h
    else:
        return x.at + h * x.h


@triton.jit
def token_at(x: Strided, b, n, mask, PAGE: tl.constexpr):
    """Where the tokens `n` lie, from `head_of` on; of pages of `PAGE` tokens only those of the mask."""
    if x.table is None:
        return n.to(tl.int64) * x.n
    else:
        page = tl.load(x.table + b * x.table_b + n // PAGE, mask=mask, other=0).to(tl.int64)
        return page * x.b + (n % PAGE).to(tl.int64) * x.n


def strided(tensor: Tensor | None) -> Strided:
    """For a launch; without a tensor, `at` is None."""
    return Strided(None, 0, 0, 0) if tensor is None else Strided(tensor, *tensor.stride()[:3])


def in_pages(tensor: Tensor | None, table: Tensor) -> Strided:
    """For a launch: a tensor `[pages, H_KV, size, ...]`; without a tensor, `at` is None."""
    return strided(tensor)._replace(table=table, table_b=table.stride(0))
