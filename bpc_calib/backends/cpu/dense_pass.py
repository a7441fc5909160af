"""Attention of several new tokens of one sequence to all before them, over parts of the keys that threads share.

torch's own kernel reads the keys once for all queries of a KV head, but gives each head to one thread.
"""

import math

import torch
from torch import Tensor

from bpc_calib.compat import attention_with_sums
from bpc_calib.method.state import Rows, State

__all__ = ["dense_pass", "parts_of"]

LEAST = 2048  # tokens that are worth a thread


def parts_of(keys: Tensor, tokens: int) -> int:
    """Return into how many parts to cut so many tokens of keys `[B, H_KV, N, D]`, so that all threads have as many."""
    (batch, kv_heads), threads = keys.shape[:2], torch.get_num_threads()
    return 1 if batch > 1 else max(1, min(threads // math.gcd(threads, kv_heads), tokens // LEAST))


def dense_pass(query: Tensor, state: State, rows: Rows, scaling: float, new: int, parts: int) -> Tensor:
    """`bpc_calib.method.step.dense_decode` for checked arguments of one sequence without padding, and several tokens.

    The parts are put together by the sums of their exponentials.
    """
    each = (rows.longest - new) // parts
    cached = (state.keys, state.values)
    keys, values = (cut[0, :, : parts * each].unflatten(1, (parts, each)).transpose(0, 1) for cut in cached)
    out, sums = attention_with_sums(query.expand(parts, -1, -1, -1), keys, values, scaling)  # all see these tokens
    keys, values = (rest[:, :, parts * each : rows.longest].float() for rest in cached)
    sees = torch.ones(new, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - new).repeat(query.shape[2] // new, 1)
    logits = (query.float() @ keys.mT * scaling).masked_fill(~sees, -torch.inf)
    shares = torch.cat([sums, logits.logsumexp(-1)]).softmax(0).unsqueeze(-1)
    return (shares * torch.cat([out.float(), logits.softmax(-1) @ values])).sum(0, keepdim=True).to(query.dtype)
