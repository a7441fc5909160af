"""A decoding step launch by launch: scores, ranks, the tokens taken, attention over them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from bpc_calib.backends.limits import tight
from bpc_calib.backends.triton import language
from bpc_calib.backends.triton.arguments import Strided, in_pages, strided
from bpc_calib.backends.triton.attend import NO_SCALES, Scales, Source, attention, queries_at_once
from bpc_calib.backends.triton.guard import guard_kernel
from bpc_calib.backends.triton.hashing import append, encode_gram, encode_nibbles, encode_with, hash_into
from bpc_calib.backends.triton.language import ROUNDED_TWICE, registers
from bpc_calib.backends.triton.limits import Limits
from bpc_calib.backends.triton.narrow import CompactShape, NarrowShape, compact_kernel, fine_kernel, middle_kernel
from bpc_calib.backends.triton.plan import PLAN_SIZE, SIDE_BY_SIDE
from bpc_calib.backends.triton.query import ENTRIES, Prepared, QueryShape, query_kernel
from bpc_calib.backends.triton.rank import RankShape, rank_kernel
from bpc_calib.backends.triton.score import Scored, ScoreShape, score_kernel
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.encoded import GAIN_MAX, GAIN_OFFSET
from bpc_calib.method.rules import Rules
from bpc_calib.method.scoring import LARGEST_OCTAVE, LARGEST_QUERY, LARGEST_SCORE, OCTAVES, STRIPES, QuantizedQuery
from bpc_calib.method.selection import as_fraction
from bpc_calib.method.state import Rows, State, within

__all__ = [
    "Ranking", "append", "attend", "choose", "dense_decode", "encode_gram", "encode_nibbles", "encode_with",
    "hash_into", "quantized", "rank", "score", "sparse_decode", "take", "workspace",
]  # fmt: skip

# Sizes to tune on a GPU; none changes a result. Programs of a kernel, at most, and keys that one takes at once.
SCORING, SCORED = 264, 512  # of 16 warps: two on each multiprocessor of an H100
RANKING, RANKED = 512, 1024  # see `ranked_at_once`
COUNTING, COUNTED = 512, 1024  # to count and to list
PROJECTED = 8192  # entries of a projection that a program multiplies queries with at once
GUARDED = 256  # tokens of the safeguard's list read at once

COARSE, FINE = language.COARSE.value, language.FINE.value


@dataclass(frozen=True)
class Ranking:
    """What the kernels of one `choose` pass on; a row is a KV head of a sequence; `room` is N rounded up."""

    queries: int  # G, on a KV head
    tables: Tensor  # int16 [rows, H / 4, ENTRIES, G_UP], see `write_tables`
    scale: Tensor  # float32 [rows]
    plan: Tensor  # int32 [rows, PLAN_SIZE], see `plan`
    heads: Tensor  # int16 [rows, room, G_UP], scores of the heads without the gain
    best: Tensor  # int32 [rows, STRIPES, G_UP], largest score of each head and stripe, with the gain
    ranked: Tensor  # int32 [rows, room]
    counts: Tensor  # int32 [rows, COARSE + middle + FINE], the three histograms
    limits: Limits

    @property
    def middle(self) -> int:
        """How many bins the second histogram has."""
        return self.counts.shape[1] - COARSE - FINE


def largest_score(codebook: Codebook) -> int:
    """What no absolute score without the gain is above."""
    return LARGEST_SCORE if codebook.nibbles else LARGEST_QUERY * codebook.bits


def middle_bins(group: str, heads: int, largest: int, gain: bool) -> int:
    """How many bins the second histogram needs for scores up to `largest`: the first and last cover the other bits."""
    reach = largest * (GAIN_MAX + GAIN_OFFSET if gain else 1)
    span = 2 * reach
    if group == "relative":
        span = 5 * heads * min(2 * reach + OCTAVES * LARGEST_OCTAVE, ((1 << 31) - 1) // (5 * heads))
    return int(1 << max(0, span.bit_length() - (FINE.bit_length() - 1) - (COARSE.bit_length() - 1)))


def ranked_at_once(heads: int) -> int:
    """Keys that one program ranks at once: fewer where many heads need the registers."""
    return RANKED if heads <= 8 else RANKED // 2


def programs(rows: int, tokens: int, block: int, most: int) -> int:
    """Programs that share the tokens of a row, each at least one block."""
    return max(1, min(triton.cdiv(tokens, block), most // rows))


def projected_at_once(dim: int, rows: int) -> int:
    """Dimensions of the queries that a program projects at once, with so many rows."""
    return int(min(64, PROJECTED // rows, max(16, triton.next_power_of_2(dim))))


def query_warps(heads: int, rows: int, size: int) -> int:
    """Warps that project queries of so many bytes per number."""
    if rows > 128 and size > 2:
        return 8 if rows <= 256 else 16
    return 4 if heads * rows <= 1024 else 8


def score(query: Tensor, codebook: Codebook, state: State, rows: Rows, rules: Rules) -> Ranking:
    """Step 1, as `sparse_decode` without its attention."""
    batch, kv_heads, heads, dim = query.shape
    bits, size, count, device = codebook.bits, codebook.projection.shape[-2], batch * kv_heads, query.device
    tokens, gain, heads_up = rows.longest, _gain(state, rules), triton.next_power_of_2(heads)
    counts = COARSE + middle_bins(rules.group, heads, largest_score(codebook), gain is not None) + FINE
    room = triton.cdiv(tokens, SIDE_BY_SIDE.value) * SIDE_BY_SIDE.value

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, *size, dtype=dtype, device=device)

    made = Ranking(
        queries=heads,
        tables=empty(bits // 4, ENTRIES.value, heads_up, dtype=torch.int16),
        scale=empty(dtype=torch.float32),
        plan=empty(PLAN_SIZE.value),
        heads=empty(room, heads_up, dtype=torch.int16),
        best=empty(STRIPES, heads_up),
        ranked=empty(room),
        counts=empty(counts),
        limits=_limits(rows, rules, batch, kv_heads),
    )
    query, projection = tight(query), tight(codebook.projection).expand(batch, *codebook.projection.shape[-3:])
    few = heads_up <= 4 and size <= 64 and dim <= 128 and query.element_size() == 2
    query_kernel[(count,)](
        strided(query), strided(projection),
        Prepared(made.scale, made.tables, made.plan, made.best, made.counts), made.limits,
        tokens, 0, rules.scale(dim),
        QueryShape(
            H_KV=kv_heads, G=heads, G_UP=heads_up, H=bits, R=size, D=dim, PART=projected_at_once(dim, size),
            GROUP=rules.group, GAIN=gain is not None, COUNTS=counts,
        ),
        num_warps=query_warps(heads_up, size, query.element_size()), num_stages=1,
        **registers(64, limited=few), **ROUNDED_TWICE,
    )  # fmt: skip
    assert state.codes is not None
    pack = min(heads_up, 4)
    word = {1: torch.int16, 2: torch.int32, 4: torch.int64}[pack]
    score_kernel[(programs(count, tokens, SCORED, SCORING), count, heads_up // pack)](
        made.tables.view(word), placed(state.codes, rows), placed(gain, rows), Scored(made.heads.view(word), made.best),
        made.limits, tokens,
        ScoreShape(
            H_KV=kv_heads, G_UP=heads_up, PACK=pack, H=bits, GROUP=rules.group, GAIN=gain is not None,
            PAGE=_page(state, rows), BLOCK=SCORED,
        ),
        num_warps=16, num_stages=1, **ROUNDED_TWICE,
    )  # fmt: skip
    return made


def _gain(state: State, rules: Rules) -> Tensor | None:
    return state.gain if rules.gain else None


def _page(state: State, rows: Rows) -> int:
    """Tokens of a page; 0: there are none."""
    return 0 if rows.block_table is None else state.room


def placed(tensor: Tensor | None, rows: Rows) -> Strided:
    """For a launch: a tensor of a state."""
    return strided(tensor) if rows.block_table is None else in_pages(tensor, rows.block_table)


def _limits(rows: Rows, rules: Rules, batch: int, kv_heads: int) -> Limits:
    """Which tokens there are and how many are chosen, for a launch."""
    valid, lengths, bounds = rows.valid, rows.lengths, None
    if valid is not None and (rules.recent or rules.sink):
        bounds = _bounds(rows, rules).expand(batch, kv_heads, 3).contiguous()
    each, share = rows.k.expand(batch, kv_heads), as_fraction(rules.safeguard)
    return Limits(
        lengths, lengths.stride(0), each, each.stride(0), each.stride(1),
        valid, 0 if valid is None else valid.stride(0), 0 if valid is None else valid.stride(1),
        bounds, rules.recent, rules.sink, share.numerator, share.denominator,
    )  # fmt: skip


def _bounds(rows: Rows, rules: Rules) -> Tensor:
    """int32 `[B, H_KV or 1, 3]`: how many tokens are real, where the newest of them begin and the first of them end."""
    valid = within(rows)
    so_far = valid.cumsum(-1).unsqueeze(1)
    count = valid.sum(-1, keepdim=True)
    newest = rows.k.clamp(max=rules.recent)
    first = torch.minimum(rows.k, count).sub(newest).clamp(max=rules.sink)
    newest_from = (so_far <= (count - newest).unsqueeze(-1)).sum(-1)
    first_to = (so_far <= first.unsqueeze(-1)).sum(-1)
    return torch.stack([count.expand_as(first), newest_from, first_to], dim=-1).to(torch.int32)


def quantized(ranking: Ranking, batch: int) -> QuantizedQuery:
    """The queries as step 1 rounded them."""
    tables = ranking.tables - (1 << 15) // ranking.tables.shape[1]
    tables = tables[..., : ranking.queries].movedim(-1, 1).contiguous()
    return QuantizedQuery(tables.unflatten(0, (batch, -1)), ranking.scale.unflatten(0, (batch, -1)))


def rank(ranking: Ranking, state: State, rows: Rows, rules: Rules) -> None:
    """Steps 2 and 3: fills `ranked` and the first histogram."""
    count, _, heads_up = ranking.best.shape
    heads, room, worst, gain = ranking.queries, ranking.ranked.shape[1], state.worst, _gain(state, rules)
    shape = RankShape(
        H_KV=count // len(rows.lengths), G=heads, G_UP=heads_up, GROUP=rules.group, GAIN=gain is not None,
        FORCES=bool(rules.recent or rules.sink), COUNTS=ranking.counts.shape[1], BLOCK=ranked_at_once(heads),
        PAGE=_page(state, rows),
    )  # fmt: skip
    rank_kernel[(programs(count, rows.longest, shape.BLOCK, RANKING), count)](
        ranking.heads, placed(gain, rows), ranking.best, ranking.plan, ranking.limits, ranking.ranked,
        ranking.counts, room, shape, num_warps=4, num_stages=1, **ROUNDED_TWICE,
    )  # fmt: skip
    if worst is not None and worst.shape[-1] and rules.safeguard:
        worst = tight(worst).flatten(0, 1)
        guard_kernel[(count,)](
            worst, ranking.plan, ranking.ranked, ranking.counts, worst.shape[-1], worst.stride(-2), room,
            COUNTS=shape.COUNTS, BLOCK=GUARDED, num_warps=4, **ROUNDED_TWICE,
        )  # fmt: skip


def take(ranking: Ranking, width: int) -> Tensor:
    """Steps 4 and 5: int64 `[rows, width]`, -1 behind the last token of each row."""
    rows, room = ranking.ranked.shape
    parts = programs(rows, room, COUNTED, COUNTING)
    above = torch.empty(rows, parts, FINE + 1, dtype=torch.int32, device=ranking.ranked.device)
    indices = torch.empty(rows, width, dtype=torch.int64, device=above.device)
    grid, common = (parts, rows), (ranking.ranked, ranking.plan, ranking.counts)
    sizes = (ranking.middle, ranking.counts.shape[1], COUNTED)
    settings = {"num_warps": 4, "num_stages": 1} | ROUNDED_TWICE
    if ranking.middle > 1:
        middle_kernel[grid](*common, room, NarrowShape(*sizes), **settings)
    fine_kernel[grid](*common, above, room, NarrowShape(*sizes), **settings)
    shape = CompactShape(*sizes, PROGRAMS_UP=triton.next_power_of_2(max(1, COUNTING // rows)))
    compact_kernel[grid](*common, above, indices, room, width, shape, **settings)
    return indices


def choose(query: Tensor, codebook: Codebook, state: State, rows: Rows, rules: Rules) -> Tensor:
    """Steps 1 to 5: int64 `[B, H_KV, width]`, -1 behind the last token of each row.

    Sequences come in groups of `at_once`.
    """
    batch, kv_heads, heads, _ = query.shape
    if not rows.width:
        return rows.k.new_empty(batch, kv_heads, 0)
    step = at_once(sequence_bytes((kv_heads, heads, rows.longest), rules))
    if batch > step:
        groups = (slice(first, first + step) for first in range(0, batch, step))
        return torch.cat([choose(query[some], *_some(some, codebook, state, rows), rules) for some in groups])
    ranking = score(query, codebook, state, rows, rules)
    rank(ranking, state, rows, rules)
    return take(ranking, rows.width).unflatten(0, query.shape[:2])


def attend(
    query: Tensor,
    state: State,
    rows: Rows,
    indices: Tensor | None,
    scaling: float | None = None,
    mean: int | None = None,
    new: int = 1,
) -> Tensor:
    """Steps 6 and 7: attention over listed tokens, int64 `[B, H_KV, k]`, or over all within the lengths.

    `mean`, `new`: see `attention`.
    """
    scales, keys, values = NO_SCALES, state.keys, state.values
    if state.scales is not None:
        scales, (keys, values) = Scales(*state.scales), (each.view(torch.uint8) for each in (keys, values))
    source = Source(placed(keys, rows), placed(values, rows), _page(state, rows), scales)
    if indices is None:
        return attention(query, source, rows.longest, scaling, lengths=rows.lengths.contiguous(), new=new)
    return attention(query, source, indices.shape[-1], scaling, indices=indices.contiguous(), mean=mean)


def dense_decode(query: Tensor, state: State, rows: Rows, scaling: float | None = None, new: int = 1) -> Tensor:
    """`bpc_calib.method.step.dense_decode` for checked arguments, without padding.

    Keys and values are read once for as many of the new tokens as a program has room for: mostly for all.
    """
    most = max(1, queries_at_once(query) * new // query.shape[2])
    if new <= most:
        return attend(query, state, rows, None, scaling, new=new)
    parts, newest = query.unflatten(2, (-1, new)).split(most, 3), rows.lengths - new
    done = []
    for part in parts:
        newest = newest + part.shape[3]
        out = attend(part.flatten(2, 3), state, replace(rows, lengths=newest), None, scaling, new=part.shape[3])
        done.append(out.view(part.shape))
    return torch.cat(done, 3).flatten(2, 3)


SMALLEST = 16  # tokens of a page are a multiple of so many: a program takes that many codes side by side
WORKSPACE = 256 << 20  # bytes of scores at once: more sequences are served one group after the other


def workspace(sizes: tuple[int, int, int], rules: Rules, sequences: int) -> int:
    """The bytes that are in use at once for so many sequences; `sizes`: KV heads, heads of each, tokens."""
    each = sequence_bytes(sizes, rules)
    return each * min(sequences, at_once(each))


def sequence_bytes(sizes: tuple[int, int, int], rules: Rules) -> int:
    """The bytes of one sequence: the scores of each head, those to rank by, the histograms for codes of either kind."""
    kv_heads, heads, tokens = sizes
    heads_up = triton.next_power_of_2(heads)
    room = triton.cdiv(tokens, SIDE_BY_SIDE.value) * SIDE_BY_SIDE.value
    counts = COARSE + middle_bins(rules.group, heads, LARGEST_SCORE, gain=True) + FINE
    return kv_heads * (room * (2 * heads_up + 4) + 4 * counts)


def at_once(each: int) -> int:
    """How many sequences of so many bytes are served at once."""
    return max(1, WORKSPACE // each)


def sparse_decode(query: Tensor, codebook: Codebook, state: State, rows: Rows, rules: Rules) -> tuple[Tensor, Tensor]:
    """`bpc_calib.method.step.sparse_decode` for checked arguments, when all keys are hashed.

    Nothing depends on a length on the host, so a CUDA graph may capture it.
    """
    chosen = choose(query, codebook, state, rows, rules)
    each = rules.by_head(rules.count(rows.longest), rows.longest)
    return attend(query, state, rows, chosen, rules.scaling, -(-sum(each) // len(each))), chosen


def _some(some: slice, codebook: Codebook, state: State, rows: Rows) -> tuple[Codebook, State, Rows]:
    """The same for some of the sequences."""
    if codebook.projection.dim() == 4:
        codebook = replace(codebook, projection=codebook.projection[some])
    if rows.block_table is None:
        state = replace(state, **_part(some, state, "keys", "values", "codes", "gain", "error", "worst"))
    return codebook, state, replace(rows, **_part(some, rows, "lengths", "k", "valid", "block_table"))


def _part(some: slice, of: State | Rows, *names: str) -> dict[str, Any]:
    tensors = {name: getattr(of, name) for name in names}
    return {name: None if tensor is None else tensor[some] for name, tensor in tensors.items()}
