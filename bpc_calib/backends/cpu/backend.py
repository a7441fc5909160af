"""The backend of a CPU: checked arguments, then the compiled kernels."""

import torch
from torch import Tensor

from bpc_calib.backends.cpu import pipeline
from bpc_calib.backends.cpu.fitting import fit
from bpc_calib.backends.cpu.native import PROJECT, SCORE, SELECT
from bpc_calib.backends.limits import unserved
from bpc_calib.backends.protocol import Request, Stage
from bpc_calib.method import appending, choosing, paging, stepping
from bpc_calib.method import dense_attention as plain_dense
from bpc_calib.method import sparse_attention as plain_sparse
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice, within
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder
from bpc_calib.method.paging import CodePages, Fresh, Paged, Rows
from bpc_calib.method.stepping import Hashed

__all__ = [
    "append", "attend_pages", "choose", "dense_attention", "encode_with", "fit", "hash_into",
    "serves", "sparse_attention", "stages", "step",
]  # fmt: skip


def serves(request: Request) -> str | None:
    """What about a call the kernels do not serve; None: nothing."""
    return unserved(request)


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
    choosing.check(query, projection, cached, k, choice)
    return pipeline.choose(query, projection, cached, k, choice, width=width)


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`."""
    return pipeline.encode_with(encoder, keys)


def append(encoder: Encoder | None, key: Tensor, value: Tensor, place: Tensor, slots: Slots) -> None:
    """`bpc_calib.method.appending.append`."""
    appending.check(encoder, key, value, place, slots)
    appending.write(key, value, None if encoder is None else encode_with(encoder, key), place, slots)


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scaling: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention`."""
    plain_sparse.check(query, keys, values, indices)
    return pipeline.sparse_attention(query, keys, values, indices, scaling)


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scaling: float | None = None,
    *,
    valid: Tensor | None = None,
) -> Tensor:
    """`bpc_calib.method.dense_attention.dense_attention`: `sparse_attention` over every token."""
    plain_dense.check(query, keys, values, lengths, valid)
    seen = within(lengths, keys.shape[2], valid)
    places = torch.arange(keys.shape[2]).where(seen, -1).unsqueeze(1)
    return pipeline.sparse_attention(query, keys, values, places.expand(-1, keys.shape[1], -1), scaling)


def step(query: Tensor, hashed: Hashed, k: int, choice: Choice) -> Tensor:
    """`bpc_calib.method.stepping.step`, in one call where codes lie one after the other."""
    stepping.check(query, hashed, k)
    slots = hashed.slots
    if all(each is None or each.is_contiguous() for each in (slots.codes, slots.gain, slots.error)):
        return pipeline.step(query, hashed, k, choice)
    stepping.store(pipeline.encode_with(hashed.encoder, stepping.newest(hashed)), hashed)
    chosen = pipeline.choose(query, hashed.projection, stepping.cached(hashed), k, choice)
    return pipeline.sparse_attention(query, *stepping.in_use(hashed), chosen, choice.scaling)


def hash_into(fresh: Fresh, pages: CodePages) -> None:
    """`bpc_calib.method.paging.hash_into`."""
    pipeline.hash_into(fresh, pages)


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
    """`bpc_calib.method.paging.attend_pages`; plain torch attends where keys and values are not packed for a CPU."""
    if paged.packing is None:
        return paging.attend_pages(query, projection, paged, rows, choice, gain=gain, fresh=fresh)
    paging.check(query, projection, paged, rows)
    return pipeline.attend_pages(query, projection, paged, rows, choice, gain=gain, fresh=fresh)


def stages(query: Tensor, projection: Tensor, k: int, choice: Choice) -> dict[str, Stage]:
    """The stages `project`, `score` and `select` of `choose`, each with those before it."""

    def until(stages: int) -> Stage:
        return lambda codes, gain: pipeline.run_stages(
            query, projection, Cached(codes, gain), k, choice, stages=stages
        )[0]

    return {"project": until(PROJECT), "score": until(PROJECT | SCORE), "select": until(PROJECT | SCORE | SELECT)}
