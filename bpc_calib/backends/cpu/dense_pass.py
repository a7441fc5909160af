"""Attention of several new tokens to all before them; of one sequence over parts of the keys, which threads share.

torch's own kernel reads the keys once for all queries of a KV head, but gives each head to one thread.
"""

import math

import torch
from torch import Tensor

from bpc_calib.compat import attention_with_sums
from bpc_calib.method.state import Rows, State
from bpc_calib.method.step import check, dense_decode

__all__ = ["dense_pass"]

LEAST = 2048  # tokens that are worth a thread


def dense_pass(query: Tensor, state: State, rows: Rows, scaling: float | None, new: int) -> Tensor:
    """`bpc_calib.method.step.dense_decode` for several tokens; the parts are put together by their sums."""
    parts = _parts(state, rows, new)
    if parts == 1:
        return dense_decode(query, state, rows, scaling, new=new)
    check(query, None, state, rows, new)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    each = (rows.longest - new) // parts
    cached = (state.keys, state.values)
    keys, values = (cut[0, :, : parts * each].unflatten(1, (parts, each)).transpose(0, 1) for cut in cached)
    out, sums = attention_with_sums(query.expand(parts, -1, -1, -1), keys, values, scaling)  # all see these tokens
    keys, values = (rest[:, :, parts * each : rows.longest].float() for rest in cached)
    sees = torch.ones(new, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - new).repeat(query.shape[2] // new, 1)
    logits = (query.float() @ keys.mT * scaling).masked_fill(~sees, -torch.inf)
    shares = torch.cat([sums, logits.logsumexp(-1)]).softmax(0).unsqueeze(-1)
    return (shares * torch.cat([out.float(), logits.softmax(-1) @ values])).sum(0, keepdim=True).to(query.dtype)


def _parts(state: State, rows: Rows, new: int) -> int:
    """Return how many parts give all threads as much to do: of one sequence without padding; of others 1."""
    (batch, kv_heads), threads = state.keys.shape[:2], torch.get_num_threads()
    if batch > 1 or rows.valid is not None:
        return 1
    return max(1, min(threads // math.gcd(threads, kv_heads), (rows.longest - new) // LEAST))
