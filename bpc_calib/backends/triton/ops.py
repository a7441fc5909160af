"""The kernels as operators of torch, `torch.ops.bpc`: `torch.compile` sees only the shapes that they return.

Operators take no dataclasses: here alone, `State`, `Rows`, `Rules` and codebooks are spelled out.
"""

import torch
from torch import Tensor

from bpc_calib.backends.triton import pipeline
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State

__all__ = ["append", "dense_decode", "encode", "sparse_decode"]


@torch.library.custom_op("bpc::sparse_decode", mutates_args=())
def sparse_decode(
    query: Tensor,
    projection: Tensor,
    nibbles: bool,
    keys: Tensor,
    values: Tensor,
    codes: Tensor,
    gain: Tensor | None,
    worst: Tensor | None,
    keys_scale: Tensor | None,
    values_scale: Tensor | None,
    lengths: Tensor,
    k: Tensor,
    longest: int,
    width: int,
    valid: Tensor | None,
    block_table: Tensor | None,
    scaling: float,
    group: str,
    recent: int,
    sink: int,
    safeguard: float,
) -> tuple[Tensor, Tensor]:
    """`bpc_calib.method.step.sparse_decode`, when all keys are hashed."""
    scales = None if keys_scale is None or values_scale is None else (keys_scale, values_scale)
    state = State(keys, values, codes, gain, worst=worst, scales=scales)
    rules = Rules(recent=recent, sink=sink, group=group, safeguard=safeguard, scaling=scaling)
    codebook = Codebook(projection, projection.mT, projection, None, None, nibbles)  # only hashing reads the matrices
    with torch.cuda.device_of(query):
        return pipeline.sparse_decode(
            query, codebook, state, Rows(lengths, k, longest, width, valid, block_table), rules
        )


@sparse_decode.register_fake
def _(
    query, projection, nibbles, keys, values, codes, gain, worst, keys_scale, values_scale, lengths, k, longest, width,
    valid, block_table, scaling, group, recent, sink, safeguard,
):  # fmt: skip
    return query.new_empty(query.shape), codes.new_empty(*query.shape[:2], width)


@torch.library.custom_op("bpc::dense_decode", mutates_args=())
def dense_decode(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, longest: int, scaling: float, new: int = 1
) -> Tensor:
    """`bpc_calib.method.step.dense_decode`, of sequences without padding."""
    with torch.cuda.device_of(query):
        rows = Rows(lengths, lengths.unsqueeze(-1), longest, longest)
        return pipeline.dense_decode(query, State(keys, values), rows, scaling, new)


@dense_decode.register_fake
def _(query, keys, values, lengths, longest, scaling, new=1):
    return query.new_empty(query.shape)


@torch.library.custom_op("bpc::encode", mutates_args=())
def encode(
    matrix: Tensor, gram: Tensor, metric: Tensor | None, mean: Tensor | None, nibbles: bool, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`bpc_calib.method.encoding.encode_with`: codes, error and gain."""
    with torch.cuda.device_of(keys):
        encoded = pipeline.encode_with(Codebook(matrix.mT, matrix, gram, metric, mean, nibbles), keys)
    return encoded.codes, encoded.error, encoded.gain


@encode.register_fake
def _(matrix, gram, metric, mean, nibbles, keys):
    lead, codebook = keys.shape[:-1], Codebook(matrix.mT, matrix, gram, metric, mean, nibbles)
    return (
        keys.new_empty(*lead, codebook.words, dtype=torch.int64),
        keys.new_empty(lead, dtype=torch.float32),
        keys.new_empty(lead, dtype=torch.uint8),
    )


@torch.library.custom_op("bpc::append", mutates_args=("keys", "values", "codes", "gain", "error"))
def append(
    matrix: Tensor | None,
    gram: Tensor | None,
    metric: Tensor | None,
    mean: Tensor | None,
    nibbles: bool,
    key: Tensor,
    value: Tensor,
    at: Tensor,
    keys: Tensor,
    values: Tensor,
    codes: Tensor | None,
    gain: Tensor | None,
    error: Tensor | None,
) -> None:
    """`bpc_calib.method.step.append`, of one token of each sequence."""
    codebook = None if matrix is None or gram is None else Codebook(matrix.mT, matrix, gram, metric, mean, nibbles)
    with torch.cuda.device_of(key):
        pipeline.append(State(keys, values, codes, gain, error), codebook, key, value, at)


@append.register_fake
def _(matrix, gram, metric, mean, nibbles, key, value, at, keys, values, codes, gain, error):
    return None
