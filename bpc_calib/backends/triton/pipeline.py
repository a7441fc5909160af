"""The kernels behind the signatures of their torch oracles: what is allocated, and what is launched in which order."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from bpc_calib.backends.triton.attend import attend_kernel, reduce_kernel
from bpc_calib.backends.triton.compact import compact_kernel
from bpc_calib.backends.triton.encode import encode_kernel, greedy_kernel
from bpc_calib.backends.triton.guard import guard_kernel
from bpc_calib.backends.triton.narrow import fine_kernel, middle_kernel, upper_kernel
from bpc_calib.backends.triton.prep import PLAN, prep_kernel
from bpc_calib.backends.triton.score import best_kernel, score_kernel
from bpc_calib.method.choosing import within
from bpc_calib.method.encoding import Encoded, Encoder
from bpc_calib.method.scoring import GROUPS, QuantizedQuery
from bpc_calib.method.selection import as_fraction

__all__ = [
    "Ranking",
    "choose",
    "encode_gram",
    "encode_with",
    "prepare",
    "quantize_query",
    "quantized",
    "rank",
    "sparse_attention",
    "take",
]

# Sizes that a GPU is to confirm. None changes a result.
SCORED = 1024  # keys a program scores, see `scored`
COUNTED = 2048  # keys a program counts and lists
GUARDED = 256  # tokens of the safeguard's list read at once
COARSE = 128  # bins of the first histogram
PROGRAMS = 512  # that share the list of an attention
LISTED = 64  # tokens attended at once, in 16 bits
HASHED = 64  # keys a program hashes
PART = 32  # of their dimensions at a time

no_contraction = {"enable_fp_fusion": False}  # a * b + c rounded twice, as torch does


@dataclass(frozen=True)
class Ranking:
    """What the kernels of one step leave for each other; a row is a KV head of a sequence."""

    values: Tensor  # int8 [rows, G, H]
    totals: Tensor  # int32 [rows, G], sums of the values
    scale: Tensor  # float32 [rows]
    plan: Tensor  # int32 [rows, 8], see `PLAN`
    best: Tensor  # int32 [rows, G_UP], largest score of each head
    ranked: Tensor  # int32 [rows, N and a few more]
    coarse: Tensor  # int32 [rows, COARSE]
    middle: Tensor  # int32 [rows, 2^...]
    threshold: Tensor  # int32 [rows, 2]
    fine: Tensor  # int32 [rows, 256]


def middle_bins(group: str, heads: int, bits: int, gain: bool) -> int:
    """How many bins the second histogram needs, whatever the scores: those that the others leave of their span."""
    reach = 127 * bits * (287 if gain else 1)
    span = 2 * reach
    if group == "relative":
        span = 5 * heads * min(2 * reach, ((1 << 31) - 1) // (5 * heads))
    elif group == "sum":
        span *= heads
    return int(1 << max(0, span.bit_length() - (8 + COARSE.bit_length() - 1)))


def packed(heads: int, bits: int) -> int:
    """Keys in a row of the product of scores: at least 16 columns and 32 bytes, as int8 products need."""
    return max(16 // triton.next_power_of_2(heads), 256 // bits)


def scored(heads: int) -> int:
    """Keys a program scores: fewer where many heads need the registers."""
    return SCORED if heads <= 8 else SCORED // 2


def prep_warps(bits: int, dim: int) -> int:
    """Of the first kernel, which holds a whole projection in its registers."""
    return 8 if bits * triton.next_power_of_2(dim) <= 1 << 12 else 16


def prepare(
    query: Tensor,
    projection: Tensor,
    k: int | Tensor,
    tokens: int,
    *,
    group: str,
    gain: bool,
    scaling: float,
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    safeguard: float = 0.0,
) -> Ranking:
    """Step 1 for queries `[B, H_KV, G, D]`, projections `[(B,) H_KV, H, D]` and up to `tokens` keys."""
    batch, kv_heads, heads, dim = query.shape
    bits, rows, device = projection.shape[-2], batch * kv_heads, query.device
    query, projection = _tight(query), _tight(projection.to(query.dtype)).expand(batch, *projection.shape[-3:])

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    made = Ranking(
        values=empty(heads, bits, dtype=torch.int8),
        totals=empty(heads),
        scale=empty(dtype=torch.float32),
        plan=empty(len(PLAN)),
        best=empty(triton.next_power_of_2(heads)),
        ranked=empty(triton.cdiv(tokens, 16) * 16),  # rows begin at multiples of 64 bytes
        coarse=empty(COARSE),
        middle=empty(middle_bins(group, heads, bits, gain)),
        threshold=empty(2),
        fine=empty(256),
    )
    ks = bounds = None
    if isinstance(k, Tensor):
        ks, k = k.to(torch.int32), 0
    if valid is not None and (recent or sink):
        bounds = _bounds(valid, lengths, ks, k, recent, sink).expand(batch, kv_heads, 3).contiguous()
    if ks is not None:
        ks = ks.expand(batch, kv_heads).contiguous()
    if lengths is not None:
        lengths = lengths.contiguous()
    share = as_fraction(safeguard)
    prep_kernel[(rows,)](
        query, projection, made.values, made.totals, made.scale, made.plan, made.best, made.coarse, made.middle,
        made.fine, lengths, ks, bounds, tokens, k, recent, sink, share.numerator, share.denominator, scaling,
        *query.stride()[:3], *projection.stride()[:3],
        H_KV=kv_heads, G=heads, G_UP=made.best.shape[1], H=bits, D=dim, D_UP=triton.next_power_of_2(dim), GROUP=group,
        GAIN=gain, COARSE=COARSE, MIDDLE=made.middle.shape[1], FINE=256,
        num_warps=prep_warps(bits, dim), **no_contraction,
    )  # fmt: skip
    return made


def _tight(tensor: Tensor) -> Tensor:
    """With a contiguous last dimension, which all kernels count on."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bounds(valid: Tensor, lengths: Tensor | None, ks: Tensor | None, k: int, recent: int, sink: int) -> Tensor:
    """int32 `[B, H_KV or 1, 3]`: how many tokens are real, where the newest of them begin and the first of them end."""
    if lengths is not None:
        valid = within(lengths, valid.shape[1], valid)
    so_far = valid.cumsum(-1).unsqueeze(1)
    count = so_far[..., -1]
    wanted = torch.full_like(count, k) if ks is None else ks
    newest = wanted.clamp(max=recent)
    first = torch.minimum(wanted, count).sub(newest).clamp(max=sink)
    newest_from = (so_far <= (count - newest).unsqueeze(-1)).sum(-1)
    first_to = (so_far <= first.unsqueeze(-1)).sum(-1)
    return torch.stack([count.expand_as(first), newest_from, first_to], dim=-1).to(torch.int32)


def quantize_query(query: Tensor, projection: Tensor) -> QuantizedQuery:
    """`bpc_calib.quantize_query` for `[B, H_KV, G, D]`, as step 1 rounds."""
    return quantized(prepare(query, projection, 1, 1, group="max", gain=False, scaling=1.0), len(query))


def quantized(ranking: Ranking, batch: int) -> QuantizedQuery:
    """The queries as step 1 rounded them, in the form of `quantize_query`."""
    return QuantizedQuery(ranking.values.unflatten(0, (batch, -1)), ranking.scale.unflatten(0, (batch, -1)))


def rank(
    ranking: Ranking, codes: Tensor, gain: Tensor | None, *, group: str, valid: Tensor | None, worst: Tensor | None
) -> None:
    """Steps 2 and 3: fills `ranked` and `coarse`, for codes `[B, H_KV, N, W]` and gains `[B, H_KV, N]`."""
    _, heads, bits = ranking.values.shape
    kv_heads, tokens = codes.shape[1:3]
    rows = len(ranking.plan)
    heads_up = triton.next_power_of_2(heads)
    held = codes.view(torch.int8)
    strides = (
        *held.stride()[:3],
        *((0, 0, 0) if gain is None else gain.stride()),
        0 if valid is None else valid.stride(0),
    )
    shape = {
        "H_KV": kv_heads, "G": heads, "G_UP": heads_up, "H": bits, "TIGHT": held.stride(2) == bits // 8,
        "PACK": packed(heads, bits), "BLOCK": scored(heads),
    }  # fmt: skip
    grid = (triton.cdiv(tokens, scored(heads)), rows)
    asked = (ranking.values, ranking.totals, held, gain, valid, ranking.plan, ranking.best)
    if group == "relative":
        best_kernel[grid](*asked, *strides, **shape, num_warps=4)
    score_kernel[grid](
        *asked, ranking.ranked, ranking.coarse, *strides, ranking.ranked.stride(0), GROUP=group, COARSE=COARSE, **shape,
        num_warps=4,
    )  # fmt: skip
    if worst is not None:
        guard_kernel[(rows,)](
            worst, ranking.plan, ranking.ranked, ranking.coarse, worst.shape[-1], worst.stride(-2),
            ranking.ranked.stride(0), COARSE=COARSE, BLOCK=GUARDED, num_warps=4,
        )  # fmt: skip


def take(ranking: Ranking, width: int, *, ragged: bool) -> Tensor:
    """Steps 4 and 5: int64 `[rows, width]`, -1 behind the last token of a row."""
    rows, tokens = ranking.ranked.shape
    blocks = triton.cdiv(tokens, COUNTED)
    above = torch.empty(rows, blocks, 257, dtype=torch.int32, device=ranking.ranked.device)
    indices = torch.empty(rows, width, dtype=torch.int64, device=above.device)
    if ragged:
        indices.fill_(-1)
    bins, stride = {"COARSE": COARSE, "MIDDLE": ranking.middle.shape[1]}, ranking.ranked.stride(0)
    counts = (ranking.plan, ranking.coarse, ranking.middle)
    if ranking.middle.shape[1] > 1:
        middle_kernel[(blocks, rows)](ranking.ranked, *counts, stride, **bins, BLOCK=COUNTED, num_warps=4)
    upper_kernel[(rows,)](ranking.coarse, ranking.middle, ranking.plan, ranking.threshold, **bins, num_warps=8)
    last = (ranking.ranked, ranking.plan, ranking.threshold, ranking.fine, above)
    fine_kernel[(blocks, rows)](*last, stride, blocks, BLOCK=COUNTED, num_warps=4)
    compact_kernel[(blocks, rows)](
        *last, indices, stride, blocks, width, BLOCKS_UP=triton.next_power_of_2(blocks), BLOCK=COUNTED, num_warps=4
    )
    return indices


def choose(
    query: Tensor,
    projection: Tensor,
    codes: Tensor,
    gain: Tensor | None,
    k: int | Tensor,
    *,
    scaling: float,
    group: str = GROUPS[0],
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    worst: Tensor | None = None,
    safeguard: float = 0.0,
    width: int | None = None,
) -> Tensor:
    """`bpc_calib.method.choosing.choose`."""
    batch, kv_heads, tokens = codes.shape[:3]
    if width is None:
        width = int(k.max()) if isinstance(k, Tensor) else k
    if not width:
        return codes.new_empty(batch, kv_heads, 0)
    if worst is not None and (not safeguard or not worst.shape[-1]):
        worst = None
    ranking = prepare(
        query, projection, k, tokens, group=group, gain=gain is not None, scaling=scaling, valid=valid, lengths=lengths,
        recent=recent, sink=sink, safeguard=safeguard if worst is not None else 0.0,
    )  # fmt: skip
    if valid is not None:
        valid = _tight(valid)
    rank(ranking, codes, gain, group=group, valid=valid, worst=None if worst is None else _tight(worst).flatten(0, 1))
    ragged = not isinstance(k, int) or width != k or any(each is not None for each in (valid, lengths, worst))
    return take(ranking, width, ragged=ragged).unflatten(0, (batch, kv_heads))


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor | None, scale: float | None = None, *,
    lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`bpc_calib.method.sparse_attention`; without indices, over the first `lengths [B]` tokens."""
    batch, kv_heads, heads, dim = query.shape
    rows, count = batch * kv_heads, keys.shape[2] if indices is None else indices.shape[-1]
    if query.dtype == torch.float64:  # a number given to a kernel is a float32 there
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
    indices, lengths = (None if each is None else each.contiguous() for each in (indices, lengths))
    attend_kernel[(splits, rows)](
        query, keys, values, indices, lengths, part, weight, largest, dim**-0.5 if scale is None else scale, count,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        H_KV=kv_heads, G=heads, D=dim, D_UP=dim_up, CHUNK=chunk, BLOCK=block,
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
        keys, matrix, gram, metric, mean, encoded.codes.view(torch.int32), encoded.error, encoded.gain, tokens,
        *keys.stride()[:3], kv_heads if own else 0,
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
