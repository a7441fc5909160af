"""The Triton backend: checked arguments, then operators of torch (`torch.ops.bpc`)."""

import torch
from torch import Tensor

from bpc_calib.backends.limits import DTYPES, capability, unserved
from bpc_calib.backends.sizes import MOST_ROWS, MOST_TOKENS
from bpc_calib.backends.triton import hashing, ops, pipeline
from bpc_calib.method import step
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.fitting import fit
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State, write_codes, write_newest, write_tokens

__all__ = ["append", "attend", "choose", "dense_decode", "encode_with", "fit", "serves", "sparse_decode"]

NO_FLOAT64 = (10, 0)  # from this capability on Triton's compiler fails at products of float64


def serves(tensor: Tensor, state: State | None = None) -> str | None:
    """What about a call the kernels do not serve; None: nothing."""
    wide = (torch.float64,) if capability(tensor.device) < NO_FLOAT64 else ()
    if (fault := unserved(tensor, state, (*DTYPES, *wide))) is not None:
        return fault
    if tensor.shape[0] * tensor.shape[1] > MOST_ROWS:
        return f"{tensor.shape[0] * tensor.shape[1]} KV heads of all sequences, more than {MOST_ROWS}"
    if state is None:
        return None if tensor.shape[2] < MOST_TOKENS else f"{tensor.shape[2]} tokens, beyond {MOST_TOKENS}"
    if state.values_at is not None:
        return "values that are packed"
    if state.room >= MOST_TOKENS:
        return f"room for {state.room} tokens, beyond {MOST_TOKENS}"
    return None


def encode_with(codebook: Codebook, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`."""
    return Encoded(*ops.encode(*_parts(codebook), keys))


def _parts(codebook: Codebook) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """What operators that hash take of a codebook."""
    return codebook.matrix, codebook.gram, codebook.metric, codebook.mean, codebook.nibbles


def append(state: State, codebook: Codebook | None, key: Tensor, value: Tensor | None, at: Tensor) -> None:
    """`bpc_calib.method.step.append`: a token of each sequence in one kernel, the codes of others in one."""
    step.check_append(state, codebook, key, value, at)
    if value is not None and len(at) == 1 and key.shape[0] == state.keys.shape[0]:
        parts = (*(None,) * 4, False) if codebook is None else _parts(codebook)
        ops.append(*parts, key, value, at, state.keys, state.values, state.codes, state.gain, state.error)
        return
    write_tokens(key, value, at, state)
    if codebook is None:
        return
    if key.shape[0] > 1 or state.gain is None or state.error is not None or state.room % pipeline.SMALLEST:
        write_codes(encode_with(codebook, key), at, state)
        return
    with torch.cuda.device_of(key):
        hashing.hash_into(codebook, key, state, at)


def sparse_decode(
    query: Tensor,
    codebook: Codebook,
    state: State,
    rows: Rows,
    rules: Rules,
    *,
    fresh: int = 0,
    key: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`bpc_calib.method.step.sparse_decode`."""
    step.check(query, codebook, state, rows, fresh, key, out)
    if fresh:
        write_newest(encode_with(codebook, step.newest(state, rows, fresh)), rows, state)
    if key is not None:
        append(state, codebook, key.transpose(0, 1).unsqueeze(0), None, step.newest_slots(state, rows))
    if rows.block_table is not None and (state.values_at is not None or state.room % pipeline.SMALLEST):
        return step.sparse_decode(query, codebook, state, rows, rules, out=out)
    assert state.codes is not None
    made = ops.sparse_decode(
        query, codebook.projection, codebook.nibbles, state.keys, state.values, state.codes,
        state.gain if rules.gain else None, state.worst, *(state.scales or (None, None)), rows.lengths, rows.k,
        rows.longest, rows.width, rows.valid, rows.block_table, rules.scale(query.shape[-1]), rules.group, rules.recent,
        rules.sink, rules.safeguard,
    )  # fmt: skip
    return step.given(out, made)


def choose(query: Tensor, codebook: Codebook, state: State, rows: Rows, rules: Rules) -> Tensor:
    """`bpc_calib.method.step.choose`."""
    step.check(query, codebook, state, rows)
    if rows.block_table is not None and state.room % pipeline.SMALLEST:
        return step.choose(query, codebook, state, rows, rules)
    with torch.cuda.device_of(query):
        return pipeline.choose(query, codebook, state, rows, rules)


def attend(query: Tensor, state: State, rows: Rows, indices: Tensor, scaling: float | None = None) -> Tensor:
    """`bpc_calib.method.step.attend`; plain torch attends to packed values."""
    if state.values_at is not None:
        return step.attend(query, state, rows, indices, scaling)
    with torch.cuda.device_of(query):
        return pipeline.attend(query, state, rows, indices, scaling)


def dense_decode(query: Tensor, state: State, rows: Rows, scaling: float | None = None, *, new: int = 1) -> Tensor:
    """`bpc_calib.method.step.dense_decode`; plain torch attends to padding and block tables."""
    if rows.valid is not None or rows.block_table is not None:
        return step.dense_decode(query, state, rows, scaling, new=new)
    step.check(query, None, state, rows, new if new > 1 else 0)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ops.dense_decode(query, state.keys, state.values, rows.lengths, rows.longest, scaling, new)
