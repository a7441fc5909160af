"""The kernels as operators of torch, `torch.ops.bpc`: `torch.compile` sees only the shapes that they return.

Operators take no dataclasses: here alone, `Cached`, `Choice`, `Slots` and encoders are spelled out.
"""

import torch
from torch import Tensor

from bpc_calib.backends.triton import pipeline
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import Encoder

__all__ = ["append", "choose", "dense_attention", "encode", "sparse_attention"]


@torch.library.custom_op("bpc::choose", mutates_args=())
def choose(
    query: Tensor,
    projection: Tensor,
    codes: Tensor,
    gain: Tensor | None,
    k: int,
    ks: Tensor | None,
    scaling: float,
    group: str,
    valid: Tensor | None,
    lengths: Tensor | None,
    recent: int,
    sink: int,
    worst: Tensor | None,
    safeguard: float,
    width: int,
) -> Tensor:
    """`bpc_calib.method.choosing.choose`; `ks`, if given, replaces `k`."""
    with torch.cuda.device_of(query):
        cached = Cached(codes, gain, valid=valid, lengths=lengths, worst=worst)
        choice = Choice(scaling, group, recent=recent, sink=sink, safeguard=safeguard)
        return pipeline.choose(query, projection, cached, k if ks is None else ks, choice, width=width)


@choose.register_fake
def _(query, projection, codes, gain, k, ks, scaling, group, valid, lengths, recent, sink, worst, safeguard, width):
    return codes.new_empty(*codes.shape[:2], width)


@torch.library.custom_op("bpc::sparse_attention", mutates_args=())
def sparse_attention(query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scaling: float) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention`."""
    with torch.cuda.device_of(query):
        return pipeline.sparse_attention(query, keys, values, indices, scaling)


@sparse_attention.register_fake
def _(query, keys, values, indices, scaling):
    return query.new_empty(query.shape)


@torch.library.custom_op("bpc::dense_attention", mutates_args=())
def dense_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """`bpc_calib.method.dense_attention.dense_attention`, of sequences without padding."""
    with torch.cuda.device_of(query):
        return pipeline.dense_attention(query, keys, values, lengths, scaling)


@dense_attention.register_fake
def _(query, keys, values, lengths, scaling):
    return query.new_empty(query.shape)


@torch.library.custom_op("bpc::encode", mutates_args=())
def encode(
    matrix: Tensor, gram: Tensor, metric: Tensor | None, mean: Tensor | None, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`bpc_calib.method.encoding.encode_with`: codes, error and gain."""
    with torch.cuda.device_of(keys):
        encoded = pipeline.encode_with(Encoder(matrix, gram, metric, mean), keys)
    return encoded.codes, encoded.error, encoded.gain


@encode.register_fake
def _(matrix, gram, metric, mean, keys):
    lead = keys.shape[:-1]
    return (
        keys.new_empty(*lead, -(-matrix.shape[-1] // 64), dtype=torch.int64),
        keys.new_empty(lead, dtype=torch.float32),
        keys.new_empty(lead, dtype=torch.uint8),
    )


@torch.library.custom_op("bpc::append", mutates_args=("keys", "values", "codes", "gain", "error"))
def append(
    matrix: Tensor | None,
    gram: Tensor | None,
    metric: Tensor | None,
    mean: Tensor | None,
    key: Tensor,
    value: Tensor,
    place: Tensor,
    keys: Tensor,
    values: Tensor,
    codes: Tensor | None,
    gain: Tensor | None,
    error: Tensor | None,
) -> None:
    """`bpc_calib.method.appending.append`."""
    encoder = None if matrix is None or gram is None else Encoder(matrix, gram, metric, mean)
    with torch.cuda.device_of(key):
        pipeline.append(encoder, key, value, place, Slots(keys, values, codes, gain, error))


@append.register_fake
def _(matrix, gram, metric, mean, key, value, place, keys, values, codes, gain, error):
    return None
