"""The backend of a CPU: checked arguments, then the compiled kernels."""

import torch
from torch import Tensor

from bpc_calib.backends.cpu import pipeline
from bpc_calib.backends.cpu.fitting import fit
from bpc_calib.backends.cpu.pipeline import encode_with, sparse_decode
from bpc_calib.backends.limits import unserved
from bpc_calib.method import step
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.state import Rows, State, within, write_tokens

__all__ = ["append", "dense_decode", "encode_with", "fit", "serves", "sparse_decode"]


def serves(tensor: Tensor, state: State | None = None) -> str | None:
    """What about a call the kernels do not serve; None: nothing."""
    if state is not None and state.scales is not None:
        return "keys and values of 8 bits"
    codes, others = (None, ()) if state is None else (state.codes, (state.gain, state.error))
    if codes is not None and (codes.stride(3) != 1 or codes.stride(2) != codes.shape[3]):
        return "codes that do not lie one after the other"
    if any(each is not None and each.stride(2) != 1 for each in others):
        return "gains or errors that do not lie one after the other"
    return unserved(tensor, state)


def append(state: State, codebook: Codebook | None, key: Tensor, value: Tensor | None, at: Tensor) -> None:
    """`bpc_calib.method.step.append`."""
    step.check_append(state, codebook, key, value, at)
    write_tokens(key, value, at, state)
    if codebook is not None:
        pipeline.hash_into(codebook, key, state, at)


def dense_decode(query: Tensor, state: State, rows: Rows, scaling: float | None = None) -> Tensor:
    """`bpc_calib.method.step.dense_decode`: attention over a list of every token."""
    step.check(query, None, state, rows)
    every = torch.arange(rows.longest).where(within(rows), -1).unsqueeze(1).expand(-1, query.shape[1], -1)
    return pipeline.attend(query, state, rows, every, scaling)
