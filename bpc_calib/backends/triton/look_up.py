"""Step 1 with product codes: an integer per key and query head, looked up in the tables of `tables`."""

from typing import NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided, head_of, token_at
from bpc_calib.backends.triton.constants import CENTROIDS, GAIN_OFFSET, NEVER
from bpc_calib.backends.triton.limits import Limits, counted, length_of
from bpc_calib.backends.triton.plan import share, whole
from bpc_calib.backends.triton.tables import BIAS, FIELD, FIELDS

__all__ = ["LookUpShape", "look_up_kernel"]

BYTES = tl.constexpr(8)  # of a word of a code: parts that it names


class LookUpShape(NamedTuple):
    """Constants of a compiled kernel; `_UP` is rounded up to a power of two."""

    H_KV: int
    G_UP: int
    M: int  # parts
    GROUP: str
    GAIN: bool
    PAGE: int  # tokens of a page; 0: codes and gains lie in rows
    BLOCK: int


@triton.jit(do_not_specialize=["length"])
def look_up_kernel(tables, codes: Strided, gain: Strided, heads, best, limits: Limits, length, shape: tl.constexpr):
    """Scores `heads [rows, room, G_UP]`, and for "relative" the largest of each head, `best [rows, programs, G_UP]`.

    Tables are int64 `[rows, M, 256, words]`, codes int64 `[B, H_KV, N, W]`. Grid (programs, rows).
    """
    GAIN: tl.constexpr = shape.GAIN
    GROUP: tl.constexpr = shape.GROUP
    H_KV: tl.constexpr = shape.H_KV
    PAGE: tl.constexpr = shape.PAGE
    G_UP: tl.constexpr = shape.G_UP
    M: tl.constexpr = shape.M
    BLOCK: tl.constexpr = shape.BLOCK
    IN_WORD: tl.constexpr = FIELDS if G_UP > FIELDS else G_UP
    WORDS: tl.constexpr = G_UP // IN_WORD
    READ: tl.constexpr = WORDS if WORDS < 2 else 2
    row = tl.program_id(1)
    b = (row // H_KV).to(tl.int64)
    h = (row % H_KV).to(tl.int64)
    room = whole(length)  # of a row of `heads`
    length = length_of(limits, b, length)
    first, last = share(length, BLOCK)
    g = tl.arange(0, READ * IN_WORD)
    shifts = tl.arange(0, IN_WORD).to(tl.int64) * FIELD
    for word in tl.static_range(0, WORDS, READ):  # what one load brings: up to eight heads
        own_tables = tables + row.to(tl.int64) * (M * CENTROIDS * WORDS) + word + tl.arange(0, READ)[None, :]
        top = tl.full([READ * IN_WORD], NEVER, tl.int32)
        for start in range(first, last, BLOCK):
            # One key after the other in the threads, in all tensors: else each byte would move between them.
            at = tl.max_contiguous(start + tl.arange(0, BLOCK), 1)
            inside = at < last
            of_codes = head_of(codes, b, h) + token_at(codes, b, at, inside, PAGE)
            sums = tl.full([BLOCK, READ], BIAS, tl.int64)
            for part in tl.static_range(0, M, BYTES):
                code = tl.load(of_codes + part // BYTES, mask=inside, other=0)
                for byte in tl.static_range(M if M < BYTES else BYTES):
                    entry = (part + byte) * CENTROIDS + ((code >> (8 * byte)) & 255).to(tl.int32)
                    sums += tl.load(own_tables + entry[:, None] * WORDS)
            fields = (sums[:, :, None] >> shifts[None, None, :]) & 0xFFFF
            scores = tl.reshape(fields.to(tl.int32), [BLOCK, READ * IN_WORD]) - 0x8000
            to = heads + (row.to(tl.int64) * room + at)[:, None] * G_UP + word * IN_WORD + g[None, :]
            tl.store(to, scores.to(tl.int16), mask=(at < whole(length))[:, None])
            if GROUP == "relative":
                if GAIN:
                    of_gain = head_of(gain, b, h) + token_at(gain, b, at, inside, PAGE)
                    gains = tl.load(of_gain, mask=inside, other=0).to(tl.int32)
                    scores = scores * (gains + GAIN_OFFSET)[:, None]
                scores = tl.where(counted(limits, b, at, length)[:, None], scores, NEVER)
                top = tl.maximum(top, tl.max(scores, 0))
        if GROUP == "relative":
            of_program = best + (row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * G_UP + word * IN_WORD
            tl.store(of_program + g, top)
