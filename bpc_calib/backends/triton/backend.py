"""The Triton backend: checked arguments, flattened for the operators of torch (`torch.ops.bpc`)."""

import torch
from torch import Tensor

from bpc_calib.backends.limits import DTYPES, MOST_ROWS, MOST_TOKENS, capability, unserved
from bpc_calib.backends.protocol import Request, Stage
from bpc_calib.backends.triton import hashing, ops, pipeline
from bpc_calib.backends.triton.paper import popcount_scores
from bpc_calib.backends.triton.pipeline import quantize_query
from bpc_calib.method import appending, paging, stepping
from bpc_calib.method import dense_attention as plain_dense
from bpc_calib.method import sparse_attention as plain_sparse
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice, check
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder
from bpc_calib.method.fitting import fit
from bpc_calib.method.paging import CodePages, Fresh, Paged, Rows
from bpc_calib.method.stepping import Hashed

__all__ = [
    "append", "attend_pages", "choose", "dense_attention", "encode_with", "fit", "hash_into",
    "popcount_scores", "quantize_query", "serves", "sparse_attention", "stages", "step",
]  # fmt: skip

NO_FLOAT64 = (10, 0)  # from this capability on Triton's compiler fails at products of float64


def serves(request: Request) -> str | None:
    """What about a call the kernels do not serve; None: nothing."""
    wide = (torch.float64,) if capability(request.tensor.device) < NO_FLOAT64 else ()
    if (fault := unserved(request, (*DTYPES, *wide))) is not None:
        return fault
    batch, kv_heads, tokens = request.cache
    if batch * kv_heads > MOST_ROWS or tokens >= MOST_TOKENS:
        return f"a cache {list(request.cache)}, beyond {MOST_ROWS} rows or {MOST_TOKENS} tokens"
    return None


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
    check(query, projection, cached, k, choice)
    one, ks = (0, k) if isinstance(k, Tensor) else (int(k), None)
    if width is None:
        width = one if ks is None else int(ks.max())
    return ops.choose(
        query, projection, cached.codes, cached.gain, one, ks, choice.scaling, choice.group, cached.valid,
        cached.lengths, choice.recent, choice.sink, cached.worst, choice.safeguard, width,
    )  # fmt: skip


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`."""
    return Encoded(*ops.encode(encoder.matrix, encoder.gram, encoder.metric, encoder.mean, keys))


def append(encoder: Encoder | None, key: Tensor, value: Tensor, place: Tensor, slots: Slots) -> None:
    """`bpc_calib.method.appending.append`."""
    appending.check(encoder, key, value, place, slots)
    parts = (None,) * 4 if encoder is None else (encoder.matrix, encoder.gram, encoder.metric, encoder.mean)
    ops.append(*parts, key, value, place, slots.keys, slots.values, slots.codes, slots.gain, slots.error)


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scaling: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention`."""
    plain_sparse.check(query, keys, values, indices)
    return ops.sparse_attention(query, keys, values, indices, query.shape[-1] ** -0.5 if scaling is None else scaling)


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scaling: float | None = None,
    *,
    valid: Tensor | None = None,
) -> Tensor:
    """`bpc_calib.method.dense_attention.dense_attention`; plain torch attends where there is padding."""
    if valid is not None:
        return plain_dense.dense_attention(query, keys, values, lengths, scaling, valid=valid)
    plain_dense.check(query, keys, values, lengths, valid)
    return ops.dense_attention(query, keys, values, lengths, query.shape[-1] ** -0.5 if scaling is None else scaling)


def step(query: Tensor, hashed: Hashed, k: int, choice: Choice) -> Tensor:
    """`bpc_calib.method.stepping.step`."""
    stepping.check(query, hashed, k)
    stepping.store(encode_with(hashed.encoder, stepping.newest(hashed)), hashed)
    chosen = choose(query, hashed.projection, stepping.cached(hashed), k, choice)
    return sparse_attention(query, *stepping.in_use(hashed), chosen, choice.scaling)


def hash_into(fresh: Fresh, pages: CodePages) -> None:
    """`bpc_calib.method.paging.hash_into`."""
    with torch.cuda.device_of(fresh.keys):
        hashing.hash_into(fresh, pages)


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
    """`bpc_calib.method.paging.attend_pages`; plain torch attends where a server packs keys and values for a CPU."""
    if fresh is not None:
        hash_into(fresh, paged.codes)
    if pipeline.pages_unserved(paged) is not None:
        return paging.attend_pages(query, projection, paged, rows, choice, gain=gain)
    paging.check(query, projection, paged, rows)
    with torch.cuda.device_of(query):
        return pipeline.attend_pages(query, projection, paged, rows, choice, gain=gain)


def stages(query: Tensor, projection: Tensor, k: int, choice: Choice) -> dict[str, Stage]:
    """The stages `project`, `score` and `select` of `choose`, each with those before it."""

    def score(codes: Tensor, gain: Tensor | None) -> None:
        cached = Cached(codes, gain)
        pipeline.rank(pipeline.score(query, projection, cached, k, choice), cached, choice)

    return {
        "project": lambda codes, gain: pipeline.quantize_query(query, projection),
        "score": score,
        "select": lambda codes, gain: pipeline.choose(query, projection, Cached(codes, gain), k, choice),
    }
