"""What the centroids of product codes add to the scores of a row, as integers: the tables that scoring looks up.

An entry of a table is one number per query head, up to four of them in an int64: `sum of v_i * 2^(16 i)`. So entries
are added as they are, all heads at once; a sum that `BIAS` makes positive in every field is taken apart by shifts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.constants import CENTROIDS, LARGEST_SCORE
from bpc_calib.backends.triton.language import divide, dot
from bpc_calib.backends.triton.limits import Limits, length_of, number_of
from bpc_calib.backends.triton.plan import clear, make_plan
from bpc_calib.backends.triton.quantize import HEADS, rounded

__all__ = ["BIAS", "FIELD", "FIELDS", "TableShape", "Tables", "apart", "products_kernel", "tables_kernel", "words"]

FIELD = tl.constexpr(16)  # bits of a head in a word
FIELDS = tl.constexpr(4)  # heads in a word
BIAS = tl.constexpr(0x8000800080008000 - (1 << 64))  # 2^15 in each field of a sum


class Tables(NamedTuple):
    """Where `tables_kernel` writes: see `Ranking` of `pipeline`."""

    words: Any  # int64 [rows, M, 256, words]
    scale: Any
    plan: Any
    counts: Any


class TableShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G: int
    G_UP: int
    M: int  # parts
    D: int
    WIDTH: int  # dimensions of a part
    WIDTH_UP: int
    PART: int  # dimensions of the queries at a time
    GROUP: str
    GAIN: bool
    COUNTS: int  # bins of all histograms of a row, to clear


def words(heads: int) -> int:
    """Words of an entry for so many query heads."""
    return int(max(1, triton.next_power_of_2(heads) // FIELDS.value))


def apart(tables: Tensor, heads: int) -> Tensor:
    """The numbers in words `[rows, M, 256, words]`: int16 `[rows, G, 256 M]`."""
    shifts = FIELD.value * torch.arange(FIELDS.value, device=tables.device)
    fields = (((tables + BIAS.value).unsqueeze(-1) >> shifts) & 0xFFFF) - 0x8000
    return fields.flatten(-2)[..., :heads].to(torch.int16).permute(0, 3, 1, 2).flatten(-2)


@triton.jit
def products_kernel(query: Strided, projection: Strided, centroids: Strided, exact, largest, shape: tl.constexpr):
    """Products of projected queries with centroids, `exact [rows, M, 256, G_UP]`: grid (parts, rows).

    Also their largest absolute values, `largest [rows, M, G_UP]`. Rows and centroids have the dtype of the query, and
    the 256 numbers of a dimension of the centroids are contiguous.
    """
    G: tl.constexpr = shape.G
    H_KV: tl.constexpr = shape.H_KV
    M: tl.constexpr = shape.M
    PART: tl.constexpr = shape.PART
    G_UP: tl.constexpr = shape.G_UP
    D: tl.constexpr = shape.D
    WIDTH: tl.constexpr = shape.WIDTH
    WIDTH_UP: tl.constexpr = shape.WIDTH_UP
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0).to(tl.int64)
    b = row // H_KV
    h = row % H_KV
    head = tl.arange(0, HEADS)
    i = tl.arange(0, WIDTH_UP)
    c = tl.arange(0, CENTROIDS)
    own_query = query.at + b * query.b + h * query.h
    own_projection = projection.at + b * projection.b + h * projection.h + part * WIDTH * projection.n
    own_centroids = centroids.at + b * centroids.b + h * centroids.h + part * centroids.n
    wide = tl.float64 if query.at.dtype.element_ty == tl.float64 else tl.float32
    projected = tl.zeros([HEADS, WIDTH_UP], wide)
    for first in tl.static_range(0, D, PART):
        d = first + tl.arange(0, PART)
        q = tl.load(
            own_query + head[:, None] * query.n + d[None, :], mask=(head[:, None] < G) & (d[None, :] < D), other=0
        )
        inside = (i[None, :] < WIDTH) & (d[:, None] < D)
        projected += dot(q, tl.load(own_projection + i[None, :] * projection.n + d[:, None], mask=inside, other=0))
    C = tl.load(own_centroids + i[:, None] * CENTROIDS + c[None, :], mask=i[:, None] < WIDTH, other=0)
    products = dot(projected, C.to(wide))
    to = row * M + part
    of_head = head < G_UP  # of those from G on the products are 0
    tl.store(exact + (to * CENTROIDS + c[None, :]) * G_UP + head[:, None], products, mask=of_head[:, None])
    tl.store(largest + to * G_UP + head, tl.max(tl.abs(products), 1), mask=of_head)


@triton.jit(do_not_specialize=["length", "k"])
def tables_kernel(exact, largest, made: Tables, limits: Limits, length, k, scaling, shape: tl.constexpr):
    """Rounds the products of `products_kernel`, as `bpc_calib.method.scoring.quantize_query` does: grid (parts, rows).

    Also writes the scale and the plan, and clears `counts`.
    """
    COUNTS: tl.constexpr = shape.COUNTS
    GROUP: tl.constexpr = shape.GROUP
    H_KV: tl.constexpr = shape.H_KV
    G: tl.constexpr = shape.G
    G_UP: tl.constexpr = shape.G_UP
    M: tl.constexpr = shape.M
    IN_WORD: tl.constexpr = FIELDS if G_UP > FIELDS else G_UP
    WORDS: tl.constexpr = G_UP // IN_WORD
    row = tl.program_id(1)
    part = tl.program_id(0)
    b = (row // H_KV).to(tl.int64)
    h = (row % H_KV).to(tl.int64)
    g = tl.arange(0, G_UP)
    c = tl.arange(0, CENTROIDS)
    first = row.to(tl.int64) * M
    of_parts = tl.load(largest + (first + tl.arange(0, M)[:, None]) * G_UP + g[None, :])
    most = tl.max(tl.sum(of_parts, 0), 0)  # no score is larger
    products = tl.load(exact + ((first + part) * CENTROIDS + c[:, None]) * G_UP + g[None, :])
    numbers = tl.reshape(rounded(products, most, LARGEST_SCORE), [CENTROIDS, WORDS, IN_WORD]).to(tl.int64)
    entry = tl.sum(numbers << (tl.arange(0, IN_WORD).to(tl.int64) * FIELD)[None, None, :], 2)
    word = tl.arange(0, WORDS)
    tl.store(made.words + ((first + part) * CENTROIDS + c[:, None]) * WORDS + word[None, :], entry)
    clear(made.counts, row, COUNTS)
    if part == 0:
        scale = divide(most, tl.full([], LARGEST_SCORE, most.dtype)).to(tl.float32)
        tl.store(made.scale + row, scale)
        length = length_of(limits, b, length)
        # Each part of a sum is rounded.
        reach = tl.full([], (LARGEST_SCORE + M) * (G if GROUP == "sum" else 1), tl.int32)
        make_plan(made.plan, limits, row, length, number_of(limits, b, h, k), reach, scale, scaling, shape)
