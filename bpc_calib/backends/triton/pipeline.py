"""The kernels behind the signatures of the plain torch functions, launch by launch: `choose`, and a step over pages."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from bpc_calib.backends.limits import tight
from bpc_calib.backends.triton import language
from bpc_calib.backends.triton.arguments import Strided, in_pages, strided
from bpc_calib.backends.triton.attend import NO_SCALES, Scales, Source, attention, dense_attention, sparse_attention
from bpc_calib.backends.triton.guard import guard_kernel
from bpc_calib.backends.triton.hashing import append, encode_gram, encode_with
from bpc_calib.backends.triton.language import INTERPRET, ROUNDED_TWICE
from bpc_calib.backends.triton.limits import Limits
from bpc_calib.backends.triton.narrow import CompactShape, NarrowShape, compact_kernel, fine_kernel, middle_kernel
from bpc_calib.backends.triton.plan import PLAN_SIZE, SIDE_BY_SIDE
from bpc_calib.backends.triton.rank import RankShape, rank_kernel
from bpc_calib.backends.triton.score import Scored, ScoreShape, score_kernel
from bpc_calib.method.choosing import Cached, Choice, within
from bpc_calib.method.encoded import GAIN_MAX, GAIN_OFFSET
from bpc_calib.method.paging import Paged, Rows
from bpc_calib.method.scoring import LARGEST_QUERY, QuantizedQuery
from bpc_calib.method.selection import as_fraction

__all__ = [
    "Ranking",
    "append",
    "attend_pages",
    "choose",
    "dense_attention",
    "encode_gram",
    "encode_with",
    "pages_unserved",
    "quantize_query",
    "quantized",
    "rank",
    "score",
    "sparse_attention",
    "take",
    "workspace",
]

# Sizes to tune on a GPU; none changes a result.
PROGRAMS = 512  # programs of one kernel, at most
SCORING = 384  # of the kernel that needs most registers: as many as an H100 runs at once, see `few_registers`
SCORED = 1024  # keys that a program scores at once, see `scored`
RANKED = 1024  # keys that a program ranks at once, see `scored`
COUNTED = 1024  # keys that a program counts and lists at once
GUARDED = 256  # tokens of the safeguard's list read at once

COARSE, FINE = language.COARSE.value, language.FINE.value


@dataclass(frozen=True)
class Ranking:
    """What the kernels of one `choose` pass on; a row is a KV head of a sequence; `room` is N rounded up."""

    queries: int  # G, on a KV head
    values: Tensor  # int8 [rows, G, H]
    scale: Tensor  # float32 [rows]
    plan: Tensor  # int32 [rows, PLAN_SIZE], see `plan`
    heads: Tensor  # int16 [rows, room, G_UP], scores of the heads without the gain
    best: Tensor  # int32 [rows, programs, G_UP], largest score of each head, with the gain
    ranked: Tensor  # int32 [rows, room]
    counts: Tensor  # int32 [rows, COARSE + middle + FINE], the three histograms
    limits: Limits

    @property
    def middle(self) -> int:
        """How many bins the second histogram has."""
        return self.counts.shape[1] - COARSE - FINE


def largest_score(bits: int) -> int:
    """What no absolute score without the gain is above."""
    return LARGEST_QUERY * bits


def middle_bins(group: str, heads: int, largest: int, gain: bool) -> int:
    """How many bins the second histogram needs for scores up to `largest`: the first and last cover the other bits."""
    reach = largest * (GAIN_MAX + GAIN_OFFSET if gain else 1)
    span = 2 * reach
    if group == "relative":
        span = 5 * heads * min(2 * reach, ((1 << 31) - 1) // (5 * heads))
    return int(1 << max(0, span.bit_length() - (FINE.bit_length() - 1) - (COARSE.bit_length() - 1)))


def packed(heads: int, bits: int) -> int:
    """Keys per row of the matrix product: int8 products need at least 16 columns and 32 bytes."""
    return max(16 // triton.next_power_of_2(heads), 256 // bits)


def scored(heads: int, keys: int = SCORED) -> int:
    """Keys that one program scores or ranks at once: fewer where many heads need the registers."""
    return keys if heads <= 8 else keys // 2


def programs(rows: int, tokens: int, block: int, most: int = PROGRAMS) -> int:
    """Programs that share the tokens of a row, each at least one block."""
    return max(1, min(triton.cdiv(tokens, block), most // rows))


def projected_at_once(dim: int) -> int:
    """Dimensions of the queries that a program projects at once."""
    return int(min(64, max(16, triton.next_power_of_2(dim))))


def few_registers(heads: int, bits: int, padded: bool) -> dict[str, int]:
    """At most 168 per thread on compute capability 9.0: then three programs of four warps share a multiprocessor.

    With more heads or bits, or with padding, a program needs more, and so it does on 10.0.
    """
    if INTERPRET.value or heads > 8 or bits > 64 or padded:
        return {}
    target = driver.active.get_current_target()
    return {"maxnreg": 168} if (target.backend, target.arch) == ("cuda", 90) else {}


def score(
    query: Tensor,
    projection: Tensor,
    cached: Cached,
    k: int | Tensor,
    choice: Choice,
    *,
    table: Tensor | None = None,
) -> Ranking:
    """Step 1 for queries `[B, H_KV, G, D]` and projections `[(B,) H_KV, H, D]`.

    With a table, int32 `[B, P]`, here and in `rank`, codes and gains are those of pages `[pages, H_KV, size, ...]`.
    """
    batch, kv_heads, heads, dim = query.shape
    bits, rows, device = projection.shape[-2], batch * kv_heads, query.device
    tokens, has_gain, heads_up = _tokens(cached, table), cached.gain is not None, triton.next_power_of_2(heads)
    counts = COARSE + middle_bins(choice.group, heads, largest_score(bits), has_gain) + FINE
    parts, room = (
        programs(rows, tokens, scored(heads), SCORING),
        triton.cdiv(tokens, SIDE_BY_SIDE.value) * SIDE_BY_SIDE.value,
    )

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, *size, dtype=dtype, device=device)

    made = Ranking(
        queries=heads,
        values=empty(heads, bits, dtype=torch.int8),
        scale=empty(dtype=torch.float32),
        plan=empty(PLAN_SIZE.value),
        heads=empty(room, heads_up, dtype=torch.int16),
        best=empty(parts, heads_up),
        ranked=empty(room),
        counts=empty(counts),
        limits=_limits(cached, k, choice, batch, kv_heads),
    )
    each = 0 if isinstance(k, Tensor) else k
    query, projection = tight(query), tight(projection.to(query.dtype)).expand(batch, *projection.shape[-3:])
    codes = cached.codes.view(torch.int8)
    shape = ScoreShape(
        H_KV=kv_heads, G=heads, G_UP=heads_up, H=bits, D=dim, PART=projected_at_once(dim), GROUP=choice.group,
        GAIN=has_gain, TIGHT=codes.stride(2) == bits // 8, PAGE=_page(cached, table),
        PACK=packed(heads, bits), BLOCK=scored(heads), COUNTS=made.counts.shape[1],
    )  # fmt: skip
    score_kernel[(parts, rows)](
        strided(query), strided(projection), _placed(codes, table), _placed(cached.gain, table),
        Scored(made.values, made.scale, made.plan, made.heads, made.best, made.counts), made.limits,
        tokens, each, choice.scaling, shape,
        num_warps=4 if bits <= 64 and heads <= (8 if cached.valid is None else 4) else 8, num_stages=1,
        **few_registers(heads, bits, cached.valid is not None), **ROUNDED_TWICE,
    )  # fmt: skip
    return made


def _tokens(cached: Cached, table: Tensor | None) -> int:
    """The most tokens that a sequence can have."""
    return cached.codes.shape[2] * (1 if table is None else table.shape[1])


def _page(cached: Cached, table: Tensor | None) -> int:
    """Tokens of a page; 0: there are none."""
    return 0 if table is None else cached.codes.shape[2]


def _placed(tensor: Tensor | None, table: Tensor | None) -> Strided:
    return strided(tensor) if table is None else in_pages(tensor, table)


def _limits(cached: Cached, k: int | Tensor, choice: Choice, batch: int, kv_heads: int) -> Limits:
    """What a kernel needs of the arguments of `choose`."""
    valid, lengths, bounds = cached.valid, cached.lengths, None
    if valid is not None and (choice.recent or choice.sink):
        bounds = _bounds(valid, lengths, k, choice).expand(batch, kv_heads, 3).contiguous()
    each = k.expand(batch, kv_heads) if isinstance(k, Tensor) else None
    share = as_fraction(choice.safeguard)
    return Limits(
        lengths, 0 if lengths is None else lengths.stride(0),
        each, 0 if each is None else each.stride(0), 0 if each is None else each.stride(1),
        valid, 0 if valid is None else valid.stride(0), 0 if valid is None else valid.stride(1),
        bounds, choice.recent, choice.sink, share.numerator, share.denominator,
    )  # fmt: skip


def _bounds(valid: Tensor, lengths: Tensor | None, k: int | Tensor, choice: Choice) -> Tensor:
    """int32 `[B, H_KV or 1, 3]`: how many tokens are real, where the newest of them begin and the first of them end."""
    if lengths is not None:
        valid = within(lengths, valid.shape[1], valid)
    so_far = valid.cumsum(-1).unsqueeze(1)
    count = valid.sum(-1, keepdim=True)
    wanted = k if isinstance(k, Tensor) else torch.full_like(count, k)
    newest = wanted.clamp(max=choice.recent)
    first = torch.minimum(wanted, count).sub(newest).clamp(max=choice.sink)
    newest_from = (so_far <= (count - newest).unsqueeze(-1)).sum(-1)
    first_to = (so_far <= first.unsqueeze(-1)).sum(-1)
    return torch.stack([count.expand_as(first), newest_from, first_to], dim=-1).to(torch.int32)


def quantize_query(query: Tensor, projection: Tensor) -> QuantizedQuery:
    """`bpc_calib.quantize_query` for `[B, H_KV, G, D]`, as step 1 rounds."""
    nothing = Cached(query.new_empty(*query.shape[:2], 0, -(-projection.shape[-2] // 64), dtype=torch.int64))
    return quantized(score(query, projection, nothing, 0, Choice(1.0, group="max")), len(query))


def quantized(ranking: Ranking, batch: int) -> QuantizedQuery:
    """The queries as step 1 rounded them."""
    return QuantizedQuery(ranking.values.unflatten(0, (batch, -1)), ranking.scale.unflatten(0, (batch, -1)))


def rank(ranking: Ranking, cached: Cached, choice: Choice, *, table: Tensor | None = None) -> None:
    """Steps 2 and 3: fills `ranked` and the first histogram."""
    kv_heads, tokens = cached.codes.shape[1], _tokens(cached, table)
    rows, parts, heads_up = ranking.best.shape
    heads, room, worst = ranking.queries, ranking.ranked.shape[1], _guarding(cached, choice)
    shape = RankShape(
        H_KV=kv_heads, G=heads, G_UP=heads_up, GROUP=choice.group, GAIN=cached.gain is not None,
        FORCES=bool(choice.recent or choice.sink), PARTS_UP=triton.next_power_of_2(max(1, SCORING // rows)),
        COUNTS=ranking.counts.shape[1], BLOCK=scored(heads, RANKED), PAGE=_page(cached, table),
    )  # fmt: skip
    rank_kernel[(programs(rows, tokens, shape.BLOCK), rows)](
        ranking.heads, _placed(cached.gain, table), ranking.best, ranking.plan, ranking.limits, ranking.ranked,
        ranking.counts, room, parts, shape, num_warps=4, num_stages=1, **ROUNDED_TWICE,
    )  # fmt: skip
    if worst is not None:
        worst = tight(worst).flatten(0, 1)
        guard_kernel[(rows,)](
            worst, ranking.plan, ranking.ranked, ranking.counts, worst.shape[-1], worst.stride(-2), room,
            COUNTS=shape.COUNTS, BLOCK=GUARDED, num_warps=4, **ROUNDED_TWICE,
        )  # fmt: skip


def _guarding(cached: Cached, choice: Choice) -> Tensor | None:
    """The tokens that the safeguard draws from; None: there is no safeguard."""
    worst = cached.worst
    return worst if worst is not None and worst.shape[-1] and choice.safeguard else None


def take(ranking: Ranking, width: int) -> Tensor:
    """Steps 4 and 5: int64 `[rows, width]`, -1 behind the last token of each row."""
    rows, room = ranking.ranked.shape
    parts = programs(rows, room, COUNTED)
    above = torch.empty(rows, parts, FINE + 1, dtype=torch.int32, device=ranking.ranked.device)
    indices = torch.empty(rows, width, dtype=torch.int64, device=above.device)
    grid, common = (parts, rows), (ranking.ranked, ranking.plan, ranking.counts)
    sizes = (ranking.middle, ranking.counts.shape[1], COUNTED)
    settings = {"num_warps": 4, "num_stages": 1} | ROUNDED_TWICE
    if ranking.middle > 1:
        middle_kernel[grid](*common, room, NarrowShape(*sizes), **settings)
    fine_kernel[grid](*common, above, room, NarrowShape(*sizes), **settings)
    shape = CompactShape(*sizes, PROGRAMS_UP=triton.next_power_of_2(max(1, PROGRAMS // rows)))
    compact_kernel[grid](*common, above, indices, room, width, shape, **settings)
    return indices


def choose(
    query: Tensor,
    projection: Tensor,
    cached: Cached,
    k: int | Tensor,
    choice: Choice,
    *,
    width: int | None = None,
) -> Tensor:
    """`bpc_calib.method.choosing.choose`."""
    batch, kv_heads = query.shape[:2]
    if width is None:
        width = int(k.max()) if isinstance(k, Tensor) else k
    if not width:
        return cached.codes.new_empty(batch, kv_heads, 0)
    ranking = score(query, projection, cached, k, choice)
    rank(ranking, cached, choice)
    return take(ranking, width).unflatten(0, (batch, kv_heads))


SMALLEST = 16  # tokens of a page are a multiple of so many: a program takes that many codes side by side
WORKSPACE = 256 << 20  # bytes of scores at once: more sequences are served one group after the other


def pages_unserved(paged: Paged) -> str | None:
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
    largest = largest_score(bits)
    counts = COARSE + middle_bins(choice.group, heads, largest, gain=True) + FINE
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
        ranking = score(own, projection, cached, rows.k[some].unsqueeze(-1), choice, table=table)
        rank(ranking, cached, choice, table=table)
        chosen[some] = take(ranking, rows.width).unflatten(0, (-1, kv_heads))
        source = Source(in_pages(cache, table), in_pages(cache[..., dim:], table), size, scales)
        out[some] = attention(own, source, rows.width, choice.scaling, indices=chosen[some])
    return out, chosen
