"""The steps with the signatures of the plain torch functions: allocates tensors and launches the kernels in order."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from bpc_calib.backends.triton import constants
from bpc_calib.backends.triton.arguments import strided
from bpc_calib.backends.triton.attend import AttendShape, attend_kernel, reduce_kernel
from bpc_calib.backends.triton.compact import compact_kernel
from bpc_calib.backends.triton.encode import Hashing, encode_kernel, greedy_kernel
from bpc_calib.backends.triton.guard import guard_kernel
from bpc_calib.backends.triton.narrow import fine_kernel, middle_kernel, upper_kernel
from bpc_calib.backends.triton.plan import PLAN_SIZE
from bpc_calib.backends.triton.prep import Given, Prepared, PrepShape, prep_kernel
from bpc_calib.backends.triton.score import ScoreShape, best_kernel, score_kernel
from bpc_calib.method.choosing import Cached, Choice, within
from bpc_calib.method.encoding import GAIN_MAX, GAIN_OFFSET, Encoded, Encoder
from bpc_calib.method.scoring import LARGEST_QUERY, QuantizedQuery
from bpc_calib.method.selection import as_fraction

__all__ = [
    "Ranking",
    "choose",
    "dense_attention",
    "encode_gram",
    "encode_with",
    "prepare",
    "quantize_query",
    "quantized",
    "rank",
    "sparse_attention",
    "take",
]

# Sizes to tune on a GPU; none changes a result.
SCORED = 1024  # keys that one program scores, see `scored`
COUNTED = 2048  # keys that one program counts and lists
GUARDED = 256  # tokens of the safeguard's list read at once
PROGRAMS = 512  # programs that share the lists of one attention
LISTED = 64  # tokens attended at once, of 16-bit dtypes
HASHED = 64  # keys that one program hashes
PART = 32  # dimensions of these keys at a time

COARSE, FINE = constants.COARSE.value, constants.FINE.value

no_contraction = {"enable_fp_fusion": False}  # a * b + c rounded twice, as torch does


@dataclass(frozen=True)
class Ranking:
    """What the kernels of one `choose` pass on; a row is a KV head of a sequence."""

    values: Tensor  # int8 [rows, G, H]
    totals: Tensor  # int32 [rows, G], sums of the values
    scale: Tensor  # float32 [rows]
    plan: Tensor  # int32 [rows, PLAN_SIZE], see `plan`
    best: Tensor  # int32 [rows, G_UP], largest score of each head
    ranked: Tensor  # int32 [rows, N and a few more]
    coarse: Tensor  # int32 [rows, COARSE]
    middle: Tensor  # int32 [rows, 2^...]
    threshold: Tensor  # int32 [rows, 2]
    fine: Tensor  # int32 [rows, FINE]


def middle_bins(group: str, heads: int, bits: int, gain: bool) -> int:
    """How many bins the second histogram needs for any scores: the first and last ones cover the other bits."""
    reach = LARGEST_QUERY * bits * (GAIN_MAX + GAIN_OFFSET if gain else 1)
    span = 2 * reach
    if group == "relative":
        span = 5 * heads * min(2 * reach, ((1 << 31) - 1) // (5 * heads))
    elif group == "sum":
        span *= heads
    return int(1 << max(0, span.bit_length() - (FINE.bit_length() - 1) - (COARSE.bit_length() - 1)))


def packed(heads: int, bits: int) -> int:
    """Keys per row of the matrix product: int8 products need at least 16 columns and 32 bytes."""
    return max(16 // triton.next_power_of_2(heads), 256 // bits)


def scored(heads: int) -> int:
    """Keys that one program scores: fewer where many heads need the registers."""
    return SCORED if heads <= 8 else SCORED // 2


def prep_warps(bits: int, dim: int) -> int:
    """Warps of `prep_kernel`, which holds a whole projection in its registers."""
    return 8 if bits * triton.next_power_of_2(dim) <= 1 << 12 else 16


def prepare(query: Tensor, projection: Tensor, cached: Cached, k: int | Tensor, choice: Choice) -> Ranking:
    """Step 1 for queries `[B, H_KV, G, D]` and projections `[(B,) H_KV, H, D]`."""
    batch, kv_heads, heads, dim = query.shape
    bits, rows, device = projection.shape[-2], batch * kv_heads, query.device
    tokens, gain, lengths = cached.codes.shape[2], cached.gain is not None, cached.lengths
    query, projection = _tight(query), _tight(projection.to(query.dtype)).expand(batch, *projection.shape[-3:])

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    made = Ranking(
        values=empty(heads, bits, dtype=torch.int8),
        totals=empty(heads),
        scale=empty(dtype=torch.float32),
        plan=empty(PLAN_SIZE.value),
        best=empty(triton.next_power_of_2(heads)),
        ranked=empty(triton.cdiv(tokens, 16) * 16),  # rows begin at multiples of 64 bytes
        coarse=empty(COARSE),
        middle=empty(middle_bins(choice.group, heads, bits, gain)),
        threshold=empty(2),
        fine=empty(FINE),
    )
    ks = bounds = None
    if isinstance(k, Tensor):
        ks, k = k.to(torch.int32), 0
    if cached.valid is not None and (choice.recent or choice.sink):
        bounds = _bounds(cached.valid, lengths, k if ks is None else ks, choice)
        bounds = bounds.expand(batch, kv_heads, 3).contiguous()
    if ks is not None:
        ks = ks.expand(batch, kv_heads).contiguous()
    if lengths is not None:
        lengths = lengths.contiguous()
    share = as_fraction(choice.safeguard)
    prepared = Prepared(made.values, made.totals, made.scale, made.plan, made.best, made.coarse, made.middle, made.fine)
    shape = PrepShape(
        H_KV=kv_heads, G=heads, G_UP=made.best.shape[1], H=bits, D=dim, D_UP=triton.next_power_of_2(dim),
        GROUP=choice.group, GAIN=gain, MIDDLE=made.middle.shape[1],
    )  # fmt: skip
    prep_kernel[(rows,)](
        strided(query), strided(projection), prepared, Given(lengths, ks, bounds),
        tokens, k, choice.recent, choice.sink, share.numerator, share.denominator, choice.scaling, shape,
        num_warps=prep_warps(bits, dim), **no_contraction,
    )  # fmt: skip
    return made


def _tight(tensor: Tensor) -> Tensor:
    """With a contiguous last dimension, which all kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bounds(valid: Tensor, lengths: Tensor | None, k: int | Tensor, choice: Choice) -> Tensor:
    """int32 `[B, H_KV or 1, 3]`: how many tokens are real, where the newest of them begin and the first of them end."""
    if lengths is not None:
        valid = within(lengths, valid.shape[1], valid)
    so_far = valid.cumsum(-1).unsqueeze(1)
    count = so_far[..., -1]
    wanted = k if isinstance(k, Tensor) else torch.full_like(count, k)
    newest = wanted.clamp(max=choice.recent)
    first = torch.minimum(wanted, count).sub(newest).clamp(max=choice.sink)
    newest_from = (so_far <= (count - newest).unsqueeze(-1)).sum(-1)
    first_to = (so_far <= first.unsqueeze(-1)).sum(-1)
    return torch.stack([count.expand_as(first), newest_from, first_to], dim=-1).to(torch.int32)


def quantize_query(query: Tensor, projection: Tensor) -> QuantizedQuery:
    """`bpc_calib.quantize_query` for `[B, H_KV, G, D]`, as step 1 rounds."""
    nothing = Cached(query.new_empty(*query.shape[:2], 0, 1, dtype=torch.int64))
    return quantized(prepare(query, projection, nothing, 0, Choice(1.0, group="max")), len(query))


def quantized(ranking: Ranking, batch: int) -> QuantizedQuery:
    """The queries as step 1 rounded them."""
    return QuantizedQuery(ranking.values.unflatten(0, (batch, -1)), ranking.scale.unflatten(0, (batch, -1)))


def rank(ranking: Ranking, cached: Cached, choice: Choice) -> None:
    """Steps 2 and 3: fills `ranked` and `coarse`."""
    _, heads, bits = ranking.values.shape
    kv_heads, tokens = cached.codes.shape[1:3]
    rows = len(ranking.plan)
    codes, gain, worst = cached.codes.view(torch.int8), cached.gain, _guarding(cached, choice)
    valid = None if cached.valid is None else _tight(cached.valid)
    shape = ScoreShape(
        H_KV=kv_heads, G=heads, G_UP=triton.next_power_of_2(heads), H=bits, GROUP=choice.group,
        TIGHT=codes.stride(2) == bits // 8, PACK=packed(heads, bits), BLOCK=scored(heads),
    )  # fmt: skip
    grid = (triton.cdiv(tokens, shape.BLOCK), rows)
    common = (
        ranking.values, ranking.totals, strided(codes), strided(gain), valid, 0 if valid is None else valid.stride(0),
        ranking.plan, ranking.best,
    )  # fmt: skip
    if choice.group == "relative":
        best_kernel[grid](*common, shape, num_warps=4)
    score_kernel[grid](*common, ranking.ranked, ranking.ranked.stride(0), ranking.coarse, shape, num_warps=4)
    if worst is not None:
        worst = _tight(worst).flatten(0, 1)
        guard_kernel[(rows,)](
            worst, ranking.plan, ranking.ranked, ranking.coarse, worst.shape[-1], worst.stride(-2),
            ranking.ranked.stride(0), BLOCK=GUARDED, num_warps=4,
        )  # fmt: skip


def _guarding(cached: Cached, choice: Choice) -> Tensor | None:
    """The tokens that the safeguard draws from; None: there is no safeguard."""
    worst = cached.worst
    return worst if worst is not None and worst.shape[-1] and choice.safeguard else None


def take(ranking: Ranking, width: int, *, ragged: bool) -> Tensor:
    """Steps 4 and 5: int64 `[rows, width]`, -1 behind the last token of each row."""
    rows, tokens = ranking.ranked.shape
    blocks = triton.cdiv(tokens, COUNTED)
    above = torch.empty(rows, blocks, FINE + 1, dtype=torch.int32, device=ranking.ranked.device)
    indices = torch.empty(rows, width, dtype=torch.int64, device=above.device)
    if ragged:
        indices.fill_(-1)
    bins, stride = ranking.middle.shape[1], ranking.ranked.stride(0)
    counts = (ranking.plan, ranking.coarse, ranking.middle)
    if bins > 1:
        middle_kernel[(blocks, rows)](ranking.ranked, *counts, stride, MIDDLE=bins, BLOCK=COUNTED, num_warps=4)
    upper_kernel[(rows,)](ranking.coarse, ranking.middle, ranking.plan, ranking.threshold, MIDDLE=bins, num_warps=8)
    last = (ranking.ranked, ranking.plan, ranking.threshold, ranking.fine, above)
    fine_kernel[(blocks, rows)](*last, stride, blocks, BLOCK=COUNTED, num_warps=4)
    compact_kernel[(blocks, rows)](
        *last, indices, stride, blocks, width, BLOCKS_UP=triton.next_power_of_2(blocks), BLOCK=COUNTED, num_warps=4
    )
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
    ranking = prepare(query, projection, cached, k, choice)
    rank(ranking, cached, choice)
    limits = (cached.valid, cached.lengths, _guarding(cached, choice))
    ragged = not isinstance(k, int) or width != k or any(each is not None for each in limits)
    return take(ranking, width, ragged=ragged).unflatten(0, (batch, kv_heads))


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scale: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention`."""
    return _attention(query, keys, values, scale, indices=indices.contiguous(), lengths=None)


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float | None = None) -> Tensor:
    """`bpc_calib.method.dense_attention.dense_attention`, of sequences without padding."""
    return _attention(query, keys, values, scale, indices=None, lengths=lengths.contiguous())


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    *,
    indices: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    """Steps 6 and 7: over the tokens `indices`, or without them over the first `lengths [B]`."""
    batch, kv_heads, heads, dim = query.shape
    rows, count = batch * kv_heads, keys.shape[2] if indices is None else indices.shape[-1]
    if query.dtype == torch.float64:  # kernels get numbers as float32
        query, scale = query * (dim**-0.5 if scale is None else scale), 1.0
    dim_up = max(16, triton.next_power_of_2(dim))  # the least depth of a matrix product
    block = 2 * LISTED // query.element_size()  # as many bytes for wider dtypes
    # A power of two, so that few kernels are compiled while a list grows.
    chunk = max(block, triton.next_power_of_2(triton.cdiv(count * rows, PROGRAMS)))
    splits = max(1, triton.cdiv(count, chunk))
    wide = torch.promote_types(query.dtype, torch.float32)
    part = torch.empty(rows, splits, heads, dim, dtype=wide, device=query.device)
    weight = torch.empty(rows, splits, heads, dtype=wide, device=query.device)
    largest = torch.empty_like(weight)
    out = torch.empty(batch, kv_heads, heads, dim, dtype=query.dtype, device=query.device)
    attend_kernel[(splits, rows)](
        strided(query), strided(keys), strided(values), indices, lengths, part, weight, largest,
        dim**-0.5 if scale is None else scale, count,
        AttendShape(H_KV=kv_heads, G=heads, D=dim, D_UP=dim_up, CHUNK=chunk, BLOCK=block),
        num_warps=4, num_stages=3 if query.element_size() == 2 and torch.version.hip is None else 1,
    )  # fmt: skip
    reduce_kernel[(heads, rows)](
        part, weight, largest, out, splits,
        D=dim, D_UP=dim_up, SPLITS_UP=triton.next_power_of_2(splits), BLOCK=16, num_warps=4,
    )  # fmt: skip
    return out


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with` for keys `[B, H_KV, N, D]`."""
    encoder.check(keys)
    batch, kv_heads, tokens, dim = keys.shape
    bits = encoder.matrix.shape[-1]
    encoded = _empty((batch, kv_heads, tokens), bits, keys.device)
    own = encoder.matrix.dim() == 4 and encoder.matrix.shape[0] > 1  # projections of each sequence
    matrix, gram, metric, mean = (
        None if each is None else each.expand(batch if own else 1, kv_heads, *each.shape[-rank:]).contiguous()
        for each, rank in ((encoder.matrix.mT, 2), (encoder.gram, 2), (encoder.metric, 2), (encoder.mean, 1))
    )
    encode_kernel[(triton.cdiv(tokens, HASHED), batch * kv_heads)](
        strided(keys), Hashing(matrix, gram, metric, mean, kv_heads if own else 0),
        encoded.codes.view(torch.int32), encoded.error, encoded.gain, tokens,
        H_KV=kv_heads, D=dim, H=bits, PART=PART, BLOCK=HASHED, num_warps=8, **no_contraction,
    )  # fmt: skip
    return encoded


def encode_gram(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_gram` for products `[rows, N, H]`."""
    rows, tokens, bits = scores.shape
    encoded = _empty((rows, tokens), bits, scores.device)
    gram = gram.expand(rows, bits, bits).contiguous()
    greedy_kernel[(triton.cdiv(tokens, HASHED), rows)](
        scores.contiguous(), squared_norm.expand(rows, tokens).contiguous(), gram, encoded.codes.view(torch.int32),
        encoded.error, encoded.gain, tokens, bits * bits, H=bits, BLOCK=HASHED, num_warps=8, **no_contraction,
    )  # fmt: skip
    return encoded


def _empty(shape: tuple[int, ...], bits: int, device: torch.device) -> Encoded:
    return Encoded(
        codes=torch.empty(*shape, -(-bits // 64), dtype=torch.int64, device=device),
        error=torch.empty(shape, dtype=torch.float32, device=device),
        gain=torch.empty(shape, dtype=torch.uint8, device=device),
    )
