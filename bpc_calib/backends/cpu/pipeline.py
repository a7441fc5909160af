"""The compiled kernels behind the signatures of the plain torch functions: what is allocated, and what runs when."""

import torch
from torch import Tensor

from bpc_calib.backends.cpu.attend import Attention, attend_kernel, work_size
from bpc_calib.backends.cpu.encode import greedy_kernel, hash_kernel
from bpc_calib.backends.cpu.kernels import PROJECT, SELECT, choose_kernel
from bpc_calib.backends.cpu.layout import ELEMENTS, address, encoder_fields, like, rows_of, strides
from bpc_calib.backends.cpu.prep import table_size
from bpc_calib.backends.cpu.score import GROUP_CODES, PAD, sample_size
from bpc_calib.backends.cpu.step import Step
from bpc_calib.backends.cpu.threads import one_at_a_time, parts, run, scratch, set_threads
from bpc_calib.backends.limits import tight
from bpc_calib.errors import InputError
from bpc_calib.method import sparse_attention as plain_sparse
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder
from bpc_calib.method.scoring import QuantizedQuery
from bpc_calib.method.selection import as_fraction

__all__ = [
    "FEW",
    "choose",
    "encode_gram",
    "encode_with",
    "quantize_query",
    "run_stages",
    "sparse_attention",
]

FEW = 4  # tokens hashed in one kernel: for more, torch's products are faster
BLOCK = 2048  # tokens of a prompt hashed at once


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
    return run_stages(query, projection, cached, k, choice, width=width)[0]


def run_stages(
    query: Tensor,
    projection: Tensor,
    cached: Cached,
    k: int | Tensor,
    choice: Choice,
    *,
    width: int | None = None,
    last: int = SELECT,
) -> tuple[Tensor, QuantizedQuery]:
    """The stages of `choose` up to `last`: the indices, which only `SELECT` writes, and the rounded queries."""
    codes, gain, valid, lengths, worst = cached.codes, cached.gain, cached.valid, cached.lengths, cached.worst
    (batch, kv_heads, heads, dim), (tokens, words) = query.shape, codes.shape[2:]
    bits, rows, fours = projection.shape[-2], batch * kv_heads, -(-heads // 4)
    if width is None:
        width = int(k.max()) if isinstance(k, Tensor) else k
    if not rows or not width:
        nothing = torch.empty(batch, kv_heads, heads, bits, dtype=torch.int8)
        scale = torch.empty(batch, kv_heads, dtype=torch.float32)
        return codes.new_empty(batch, kv_heads, width), QuantizedQuery(nothing, scale)
    query, projection = tight(query), tight(projection.to(query.dtype))
    projection = projection.expand(batch, *projection.shape[-3:])
    if codes.stride(3) != 1 or codes.stride(2) != words:
        codes = codes.contiguous()
    gain, valid = (None if each is None else tight(each) for each in (gain, valid))
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    ks = None
    if isinstance(k, Tensor):
        ks, k = k.to(torch.int64).expand(batch, kv_heads), 0
    worst = None if worst is None or not choice.safeguard else worst.to(torch.int32).contiguous()
    numerator, denominator = (0, 1) if worst is None else as_fraction(choice.safeguard).as_integer_ratio()
    split = parts(rows, tokens)
    slots = min(rows, torch.get_num_threads()) if split == 1 else rows
    stride, size = -(-tokens // PAD) * PAD + PAD, table_size(words)
    part_size = stride if split == 1 else ((tokens + split - 1) // split + PAD - 1) // PAD * PAD
    values = torch.empty(batch, kv_heads, heads, bits, dtype=torch.int8)
    scale = torch.empty(batch, kv_heads, dtype=torch.float32)
    indices = torch.empty(batch, kv_heads, width, dtype=torch.int64)
    query_b, query_h, query_g = strides(query, 3)
    projection_b, projection_h, projection_n = strides(projection, 3)
    codes_b, codes_h = strides(codes, 2)
    gain_b, gain_h = strides(gain, 2)
    ks_b, ks_h = strides(ks, 2)
    with one_at_a_time:
        totals, tables, best, products, sample, marks, least, candidates, counts = scratch(
            16 * rows * fours, 4 * rows * fours * size, 16 * rows * split * fours, 8 * slots * fours * stride,
            slots * sample_size(fours), slots * stride // 8, 4 * rows, 8 * slots * stride, 8 * rows * split,
        )  # fmt: skip
        set_threads()
        step = Step(
            stages=last, element=ELEMENTS[query.dtype],
            rows=rows, kv_heads=kv_heads, heads=heads, dim=dim, bits=bits, words=words, tokens=tokens,
            slots=slots, parts=split, part_size=part_size,
            query=query.data_ptr(), query_b=query_b, query_h=query_h, query_g=query_g,
            projection=projection.data_ptr(), projection_b=projection_b, projection_h=projection_h,
            projection_n=projection_n,
            codes=codes.data_ptr(), codes_b=codes_b, codes_h=codes_h, codes_slot=0,
            gain=address(gain), gain_b=gain_b, gain_h=gain_h, gain_slot=0,
            valid=address(valid), valid_b=strides(valid, 1)[0],
            lengths=address(lengths), worst=address(worst), worst_count=0 if worst is None else worst.shape[-1],
            ks=address(ks), ks_b=ks_b, ks_h=ks_h, k=k,
            group=GROUP_CODES[choice.group], recent=choice.recent, sink=choice.sink, numerator=numerator,
            denominator=denominator, scaling=float(choice.scaling),
            totals=totals, table_size=size, tables=tables, stride=stride, products=products, best=best, sample=sample,
            marks=marks, least=least, candidates=candidates, counts=counts,
            values=values.data_ptr(), scale=scale.data_ptr(), indices=indices.data_ptr(), width=width,
        )  # fmt: skip
        choose_kernel(tuple(step))
    return indices, QuantizedQuery(values, scale)


def quantize_query(query: Tensor, projection: Tensor) -> QuantizedQuery:
    """`bpc_calib.method.scoring.quantize_query` for `[B, H_KV, G, D]`, as the first stage rounds."""
    cached = Cached(torch.empty(*query.shape[:2], 1, -(-projection.shape[-2] // 64), dtype=torch.int64))
    return run_stages(query, projection, cached, 1, Choice(scaling=1.0), last=PROJECT)[1]


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scaling: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention` for `[B, H_KV, ...]`."""
    batch, kv_heads, heads, dim = query.shape
    rows, count = batch * kv_heads, indices.shape[-1]
    if not rows or not count:
        return plain_sparse.sparse_attention(query, keys, values, indices, scaling)
    split = parts(rows, count, 64)
    query, indices = tight(query), indices.contiguous()
    out = torch.empty(batch, kv_heads, heads, dim, dtype=torch.float32)
    query_b, query_h, query_g = strides(query, 3)
    keys_b, keys_h, keys_n = strides(keys, 3)
    values_b, values_h, values_n = strides(values, 3)
    with one_at_a_time:
        partial, weights, work, faults = scratch(
            16 * rows * split * -(-heads // 4) * dim, 8 * rows * split * heads,
            rows * split * work_size(heads, dim, -(-count // split)), 8 * rows * split,
        )  # fmt: skip
        set_threads()
        call = Attention(
            query=query.data_ptr(), query_b=query_b, query_h=query_h, query_g=query_g,
            keys=keys.data_ptr(), keys_b=keys_b, keys_h=keys_h, keys_n=keys_n,
            values=values.data_ptr(), values_b=values_b, values_h=values_h, values_n=values_n,
            indices=indices.data_ptr(), count=count, scaling=float(dim**-0.5 if scaling is None else scaling),
            rows=rows, kv_heads=kv_heads, heads=heads, dim=dim, tokens=keys.shape[2], parts=split,
            partial=partial, weights=weights, work=work, faults=faults, out=out.data_ptr(),
        )  # fmt: skip
        known = attend_kernel(like(keys), tuple(call))
    if not known:
        raise InputError(f"indices must be below the {keys.shape[2]} tokens there are, and one is {int(indices.max())}")
    return out.to(query.dtype)


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`: few tokens in one kernel, many with torch's products."""
    encoder.check(keys)
    lead, (tokens, dim) = keys.shape[:-2], keys.shape[-2:]
    if tokens > FEW or not lead.numel():
        return _encode_many(encoder, keys)
    where, _tensors = encoder_fields(encoder, lead)  # the kernel reads them
    encoded, keys = _empty(lead, tokens, encoder.bits), tight(keys)
    keys_b, keys_h, keys_n = strides(keys, 3)
    hashing = (  # the fields of a `Hashing`
        keys.data_ptr(), keys_b, keys_h, keys_n, *where,
        lead.numel(), keys.shape[1], tokens, dim, encoder.bits,
        encoded.codes.data_ptr(), tokens * encoded.codes.shape[-1],
        encoded.error.data_ptr(), tokens, encoded.gain.data_ptr(), tokens,
    )  # fmt: skip
    run(hash_kernel, like(keys), hashing)
    return encoded


def _encode_many(encoder: Encoder, keys: Tensor) -> Encoded:
    """Hash a block of tokens after the other: the products of a block are still cached in the next operation."""
    with torch.autocast("cpu", enabled=False):
        blocks = [_encode_block(encoder, block) for block in keys.split(BLOCK, -2)]
    if len(blocks) == 1:
        return blocks[0]
    return Encoded(
        codes=torch.cat([block.codes for block in blocks], -2),
        error=torch.cat([block.error for block in blocks], -1),
        gain=torch.cat([block.gain for block in blocks], -1),
    )


def _encode_block(encoder: Encoder, keys: Tensor) -> Encoded:
    wide, along = encoder.centre(keys)
    return encode_gram(wide @ encoder.matrix, encoder.gram, (wide * along).sum(-1))


def encode_gram(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_gram` for float32 products `[B, H_KV, N, H]` or `[rows, N, H]`."""
    lead, (tokens, bits) = scores.shape[:-2], scores.shape[-2:]
    scores, norms = scores.contiguous(), squared_norm.expand(scores.shape[:-1]).contiguous()
    gram, encoded = rows_of(gram, lead, 2), _empty(lead, tokens, bits)
    run(
        greedy_kernel, scores.data_ptr(), norms.data_ptr(), gram.data_ptr(), gram.stride(0), lead.numel(), tokens, bits,
        encoded.codes.data_ptr(), encoded.error.data_ptr(), encoded.gain.data_ptr(),
    )  # fmt: skip
    return encoded


def _empty(lead: torch.Size, tokens: int, bits: int) -> Encoded:
    """Room for the codes of keys `[*lead, tokens, D]`."""
    return Encoded(
        codes=torch.empty(*lead, tokens, -(-bits // 64), dtype=torch.int64),
        error=torch.empty(*lead, tokens, dtype=torch.float32),
        gain=torch.empty(*lead, tokens, dtype=torch.uint8),
    )
