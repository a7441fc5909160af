"""The calls of the kernels for checked arguments: tensors become addresses and strides, nothing is copied."""

from typing import Any

import torch
from torch import Tensor

from bpc_calib.backends.cpu.native import (
    ATTEND,
    ELEMENTS,
    HASH,
    PROJECT,
    SCORE,
    SELECT,
    Call,
    address,
    library,
    run,
    strides,
)
from bpc_calib.backends.limits import tight
from bpc_calib.errors import InputError
from bpc_calib.method import sparse_attention as plain_sparse
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder
from bpc_calib.method.paging import CodePages, Fresh, Paged, Rows
from bpc_calib.method.scoring import QuantizedQuery
from bpc_calib.method.selection import as_fraction
from bpc_calib.method.stepping import Hashed

__all__ = [
    "attend_pages",
    "choose",
    "encode_gram",
    "encode_with",
    "hash_into",
    "quantize_query",
    "run_stages",
    "sparse_attention",
    "step",
]  # fmt: skip

GROUPS = {"relative": 0, "max": 1}
FEW = 4  # tokens hashed in one kernel: for more, torch's products are faster
FEW_OF_PAGES = 8
BLOCK = 2048  # tokens of a prompt hashed at once


def choose(
    query: Tensor, projection: Tensor, cached: Cached, k: int | Tensor, choice: Choice, *, width: int | None = None
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
    stages: int = PROJECT | SCORE | SELECT,
) -> tuple[Tensor, QuantizedQuery]:
    """Some stages of `choose`: the indices, which only `SELECT` writes, and the rounded queries."""
    codes, (batch, kv_heads, heads, _) = cached.codes, query.shape
    bits, words = projection.shape[-2], codes.shape[3]
    if width is None:
        width = int(k.max()) if isinstance(k, Tensor) else k
    rounded = torch.empty(batch, kv_heads, heads, bits, dtype=torch.int8)
    scale = torch.empty(batch, kv_heads, dtype=torch.float32)
    indices = torch.empty(batch, kv_heads, width, dtype=torch.int64)
    if batch * kv_heads and width:
        if codes.stride(3) != 1 or codes.stride(2) != words:
            codes = codes.contiguous()
        gain, valid = (None if each is None else tight(each) for each in (cached.gain, cached.valid))
        lengths = None if cached.lengths is None else cached.lengths.to(torch.int64).contiguous()
        ks = k.to(torch.int64).expand(batch, kv_heads) if isinstance(k, Tensor) else None
        worst = None if cached.worst is None or not choice.safeguard else cached.worst.to(torch.int32).contiguous()
        ranked, kept = _ranked(query, projection, choice, worst)
        run(
            Call(
                stages=stages, tokens=codes.shape[2], words=words, **ranked, **_where("codes", codes, 2),
                gained=gain is not None, **_where("gain", gain, 2), valid=address(valid), valid_b=strides(valid, 1)[0],
                lengths=address(lengths), **_where("ks", ks, 2), k=0 if ks is not None else k, width=width,
                rounded=rounded.data_ptr(), scale=scale.data_ptr(), indices=indices.data_ptr(),
            )
        )  # fmt: skip
        del kept
    return indices, QuantizedQuery(rounded, scale)


def quantize_query(query: Tensor, projection: Tensor) -> QuantizedQuery:
    """`bpc_calib.method.scoring.quantize_query` for `[B, H_KV, G, D]`, as the first stage rounds."""
    cached = Cached(torch.empty(*query.shape[:2], 1, -(-projection.shape[-2] // 64), dtype=torch.int64))
    return run_stages(query, projection, cached, 1, Choice(scaling=1.0), stages=PROJECT)[1]


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scaling: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention` for `[B, H_KV, ...]`."""
    batch, kv_heads, heads, dim = query.shape
    if not batch * kv_heads or not indices.shape[-1]:
        return plain_sparse.sparse_attention(query, keys, values, indices, scaling)
    query, indices = tight(query), indices.contiguous()
    out = torch.empty(batch, kv_heads, heads, dim, dtype=torch.float32)
    beyond = run(
        Call(
            stages=ATTEND, **_sizes(query), **_where("query", query, 3), **_where("keys", keys, 3),
            **_where("values", values, 3), tokens=keys.shape[2], width=indices.shape[-1], indices=indices.data_ptr(),
            out=out.data_ptr(), scaling=dim**-0.5 if scaling is None else scaling,
        )
    )  # fmt: skip
    if beyond:
        raise InputError(f"indices must be below the {keys.shape[2]} tokens there are, and one is {int(indices.max())}")
    return out.to(query.dtype)


def step(query: Tensor, hashed: Hashed, k: int, choice: Choice) -> Tensor:
    """`bpc_calib.method.stepping.step`."""
    slots, length = hashed.slots, hashed.length
    codes, gain = slots.codes, slots.gain
    assert codes is not None
    worst = None if hashed.worst is None or not choice.safeguard else hashed.worst.to(torch.int32).contiguous()
    out = torch.empty(*query.shape, dtype=torch.float32)
    indices = torch.empty(*query.shape[:2], k, dtype=torch.int64)
    ranked, kept = _ranked(query, hashed.projection, choice, worst)
    fresh = slots.keys[:, :, length - 1 : length]
    hashing, also = _hashing(hashed.encoder, fresh)
    run(
        Call(
            stages=HASH | PROJECT | SCORE | SELECT | ATTEND, tokens=length, words=codes.shape[3], **(ranked | hashing),
            first=length - 1, **_where("keys", slots.keys, 3), **_where("values", slots.values, 3),
            **_where("codes", codes, 2), gained=gain is not None, **_where("gain", gain, 2),
            **_where("error", slots.error, 2), k=k, width=k, indices=indices.data_ptr(), out=out.data_ptr(),
        )
    )  # fmt: skip
    del kept, also
    return out.to(query.dtype)


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`: few tokens in one kernel, many with torch's products."""
    encoder.check(keys)
    lead, tokens = keys.shape[:-2], keys.shape[-2]
    if tokens > FEW or not lead.numel():
        return _encode_many(encoder, keys)
    encoded, keys = _empty(lead, tokens, encoder.bits), tight(keys)
    hashing, kept = _hashing(encoder, keys)
    run(
        Call(
            stages=HASH, **hashing, batch=keys.shape[0], kv_heads=keys.shape[1], dim=keys.shape[3],
            words=encoded.codes.shape[-1], **_where("codes", encoded.codes, 2), **_where("gain", encoded.gain, 2),
            **_where("error", encoded.error, 2),
        )
    )  # fmt: skip
    del kept
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
    library().bpc_greedy(
        torch.get_num_threads(), scores.data_ptr(), norms.data_ptr(), gram.data_ptr(), gram.stride(0), lead.numel(),
        tokens, bits, encoded.codes.data_ptr(), encoded.error.data_ptr(), encoded.gain.data_ptr(),
    )  # fmt: skip
    return encoded


def hash_into(fresh: Fresh, pages: CodePages) -> None:
    """`bpc_calib.method.paging.hash_into`."""
    keys = tight(fresh.keys)
    if keys.shape[2] > FEW_OF_PAGES:
        encoded, size = encode_with(fresh.encoder, keys), pages.codes.shape[2]
        real = fresh.slots >= 0
        page, place = fresh.slots[real] // size, fresh.slots[real] % size
        pages.codes[page, :, place] = encoded.codes[0].transpose(0, 1)[real]
        pages.gain[page, :, place] = encoded.gain[0].transpose(0, 1)[real]
        return
    hashing, kept = _hashing_of_pages(fresh, keys)
    run(Call(stages=HASH, **hashing, batch=1, kv_heads=keys.shape[1], dim=keys.shape[3], **_pages(pages)))
    del kept


def attend_pages(
    query: Tensor,
    projection: Tensor,
    paged: Paged,
    rows: Rows,
    choice: Choice,
    *,
    gain: bool = True,
    fresh: Fresh | None = None,
) -> tuple[Tensor, Tensor]:
    """`bpc_calib.method.paging.attend_pages`, for checked arguments."""
    stages, also = PROJECT | SCORE | SELECT | ATTEND, None
    hashing: dict[str, int] = {}
    if fresh is not None and fresh.keys.shape[2] > FEW_OF_PAGES:
        hash_into(fresh, paged.codes)
    elif fresh is not None:
        stages |= HASH
        hashing, also = _hashing_of_pages(fresh, tight(fresh.keys))
    batch, kv_heads, _, _ = query.shape
    indices = torch.empty(batch, kv_heads, rows.width, dtype=torch.int64)
    out = torch.empty(*query.shape, dtype=torch.float32)
    ranked, kept = _ranked(query, projection, choice, None)
    cache, packing, size = paged.cache, paged.packing, paged.codes.codes.shape[2]
    assert packing is not None
    run(
        Call(
            stages=stages, tokens=rows.table.shape[1] * size, **(ranked | hashing), **_pages(paged.codes),
            gained=gain, keys=cache.data_ptr(), keys_b=cache.stride(0), keys_h=cache.stride(1),
            keys_at=packing.keys.data_ptr(), values_at=packing.values.data_ptr(), table=rows.table.data_ptr(),
            pages=rows.table.shape[1], lengths=rows.lengths.data_ptr(), ks=rows.k.data_ptr(), ks_b=1, width=rows.width,
            indices=indices.data_ptr(), out=out.data_ptr(),
        )
    )  # fmt: skip
    del kept, also
    return out.to(query.dtype), indices


def _sizes(query: Tensor) -> dict[str, int]:
    batch, kv_heads, heads, dim = query.shape
    return {"element": ELEMENTS[query.dtype], "batch": batch, "kv_heads": kv_heads, "heads": heads, "dim": dim}


def _where(name: str, tensor: Tensor | None, rank: int) -> dict[str, int]:
    """The fields of a tensor: its address, and its first strides."""
    if tensor is None:
        return {}
    ends = ("_b", "_h", "_g" if name == "query" else "_n")[:rank]
    return {name: tensor.data_ptr()} | {name + end: tensor.stride(i) for i, end in enumerate(ends)}


def _ranked(
    query: Tensor, projection: Tensor, choice: Choice, worst: Tensor | None
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """The fields of queries, projection and rules, and the tensors that the kernel reads there."""
    query, projection = tight(query), tight(projection.to(query.dtype))
    lead = projection.expand(query.shape[0], *projection.shape[-3:])
    numerator, denominator = (0, 1) if worst is None else as_fraction(choice.safeguard).as_integer_ratio()
    fields: dict[str, Any] = _sizes(query) | _where("query", query, 3) | _where("projection", lead, 3)
    fields |= {
        "bits": projection.shape[-2], "group": GROUPS[choice.group], "recent": choice.recent, "sink": choice.sink,
        "numerator": numerator, "denominator": denominator, "scaling": float(choice.scaling),
        "worst": address(worst), "worst_count": 0 if worst is None else worst.shape[-1],
    }  # fmt: skip
    return fields, (query, lead)


def _hashing(encoder: Encoder, keys: Tensor) -> tuple[dict[str, int], tuple[Tensor | None, ...]]:
    """The fields that hash keys `[B, H_KV, T, D]`, and the tensors that the kernel reads there."""
    lead = keys.shape[:2]
    tensors = {
        "matrix": rows_of(encoder.matrix.mT, lead, 2), "gram": rows_of(encoder.gram, lead, 2),
        "metric": None if encoder.metric is None else rows_of(encoder.metric, lead, 2),
        "mean": None if encoder.mean is None else rows_of(encoder.mean, lead, 1),
    }  # fmt: skip
    fields = {"element": ELEMENTS[keys.dtype], "bits": encoder.bits, "fresh_tokens": keys.shape[2]}
    fields |= _where("fresh", keys, 3)
    for name, each in tensors.items():
        fields |= {name: address(each), f"{name}_r": strides(each, 1)[0]}
    return fields, (keys, *tensors.values())


def _hashing_of_pages(fresh: Fresh, keys: Tensor) -> tuple[dict[str, int], tuple[Tensor | None, ...]]:
    fresh.encoder.check(keys)
    hashing, kept = _hashing(fresh.encoder, keys)
    slots = fresh.slots.to(torch.int64).contiguous()
    return hashing | {"slots": slots.data_ptr()}, (*kept, slots)


def _pages(pages: CodePages) -> dict[str, int]:
    codes, gain = pages.codes, pages.gain
    return {"page": codes.shape[2], "words": codes.shape[3]} | _where("codes", codes, 2) | _where("gain", gain, 2)


def _empty(lead: torch.Size, tokens: int, bits: int) -> Encoded:
    """Room for the codes of keys `[*lead, tokens, D]`."""
    return Encoded(
        codes=torch.empty(*lead, tokens, -(-bits // 64), dtype=torch.int64),
        error=torch.empty(*lead, tokens, dtype=torch.float32),
        gain=torch.empty(*lead, tokens, dtype=torch.uint8),
    )


def rows_of(tensor: Tensor, lead: torch.Size, rank: int) -> Tensor:
    """`[rows, ...]` of a tensor that may be one for several rows, each row contiguous."""
    if tensor.dim() == rank + 1 and tensor.shape[0] == lead.numel() and tensor.is_contiguous():
        return tensor  # of one sequence, as most often
    shape = tensor.shape[-rank:]
    rows = tensor.expand(*lead, *shape).reshape(-1, *shape)  # one for all has stride 0 here
    return rows if rows[:1].is_contiguous() else rows.contiguous()
