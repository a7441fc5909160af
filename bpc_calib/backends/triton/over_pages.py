"""A step over pages: the kernels of `choose` and of attention, which read through the table of each sequence."""

import triton
from torch import Tensor

from bpc_calib.backends.triton import pipeline
from bpc_calib.backends.triton.arguments import in_pages, tight
from bpc_calib.backends.triton.attend import Scales
from bpc_calib.backends.triton.attention import NO_SCALES, Source, attention
from bpc_calib.backends.triton.plan import SIDE_BY_SIDE
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.paging import Paged, Rows

__all__ = ["attend_pages", "unserved", "workspace"]

SMALLEST = 16  # tokens of a page are a multiple of so many: a program takes that many codes side by side
WORKSPACE = 256 << 20  # bytes of scores at once: more sequences are served one group after the other


def unserved(paged: Paged) -> str | None:
    """What about pages the kernels do not serve; None: nothing."""
    size = paged.codes.codes.shape[2]
    if size % SMALLEST:
        return f"pages of {size} tokens, which is no multiple of {SMALLEST}"
    return None if paged.packing is None else "keys and values that are packed"


def workspace(sizes: tuple[int, int, int], choice: Choice, bits: int, sequences: int) -> int:
    """The bytes that are in use at once for so many sequences; `sizes`: KV heads, heads of each, tokens."""
    each = sequence_bytes(sizes, choice, bits)
    return each * min(sequences, at_once(each))


def sequence_bytes(sizes: tuple[int, int, int], choice: Choice, bits: int) -> int:
    """The bytes of one sequence: the scores of each head, those to rank by, the histograms."""
    kv_heads, heads, tokens = sizes
    heads_up = triton.next_power_of_2(heads)
    room = triton.cdiv(tokens, SIDE_BY_SIDE.value) * SIDE_BY_SIDE.value
    largest = pipeline.largest_score(bits)
    counts = pipeline.COARSE + pipeline.middle_bins(choice.group, heads, largest, gain=True) + pipeline.FINE
    return kv_heads * (room * (2 * heads_up + 4) + 4 * counts)


def at_once(each: int) -> int:
    """How many sequences of so many bytes are served at once."""
    return max(1, WORKSPACE // each)


def attend_pages(
    query: Tensor, projection: Tensor, paged: Paged, rows: Rows, choice: Choice, *, gain: bool
) -> tuple[Tensor, Tensor]:
    """`bpc_calib.method.paging.attend_pages` for checked arguments, when all keys are hashed.

    Nothing depends on a length on the host, so a CUDA graph may capture it. Sequences come in groups of `at_once`.
    """
    batch, kv_heads, heads, dim = query.shape
    pages, size = paged.codes, paged.codes.codes.shape[2]
    out = query.new_empty(batch, kv_heads, heads, dim)
    chosen = pages.codes.new_empty(batch, kv_heads, rows.width)
    step = at_once(sequence_bytes((kv_heads, heads, rows.table.shape[1] * size), choice, projection.shape[-2]))
    scales = NO_SCALES if paged.scales is None else Scales(*paged.scales)
    cache = paged.cache if paged.scales is None else paged.cache.view(dtype=pages.gain.dtype)
    for first in range(0, batch, step):
        some = slice(first, first + step)
        table, own = rows.table[some], tight(query[some])
        cached = Cached(pages.codes, pages.gain if gain else None, lengths=rows.lengths[some])
        ranking = pipeline.score(own, projection, cached, rows.k[some].unsqueeze(-1), choice, table=table)
        pipeline.rank(ranking, cached, choice, table=table)
        chosen[some] = pipeline.take(ranking, rows.width).unflatten(0, (-1, kv_heads))
        source = Source(in_pages(cache, table), in_pages(cache[..., dim:], table), size, scales)
        out[some] = attention(own, source, rows.width, choice.scaling, indices=chosen[some])
    return out, chosen
