"""The paper's pipeline: int8 query, popcount scores, top-k, gather into a copy, attention on the copy."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.bench.dense import Dense, folded, matmul, ours

__all__ = ["forms", "paper_step"]

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]

SCORERS = {"triton": "Triton popcount", "numba": "numba popcount", "torch": "plain torch"}


def forms(device: torch.device) -> dict[str, Step]:
    """Return steps by name: functions of query, projection, codes, keys, values and `k` to `[B, H_KV, G, D]`."""
    backend = dispatch.backend(device)
    if backend == "triton":
        attentions: dict[str, Dense] = {"SDPA": folded, "split-KV (ours)": ours(device)}
    else:
        attentions = {"SDPA": folded, "matmul": matmul}
    if backend == "numba":
        attentions["ours"] = ours(device)
    return {
        f"{SCORERS[backend]}, {name}": functools.partial(paper_step, attention)
        for name, attention in attentions.items()
    }


def paper_step(
    attention: Dense, query: Tensor, projection: Tensor, codes: Tensor, keys: Tensor, values: Tensor, k: int
) -> Tensor:
    """Compute attention `[B, H_KV, G, D]` over the best keys by the paper's score.

    Every step is as fast as the pipeline allows: this package's own kernels round the query and compute the scores,
    the top-k stay unsorted, and the group is folded into the query's length, so that `attention` reads the copy once.

    Args:
        attention: dense attention to the copied keys and values.
        query: `[B, H_KV, G, D]`.
        projection: `[H_KV, H, D]`.
        codes: int64 `[B, H_KV, N, W]`.
        keys, values: `[B, H_KV, N, D]`.
        k: number of tokens.
    """
    backend = dispatch.find(query.device)
    scores = backend.popcount_scores(backend.quantize_query(query, projection).values, codes)
    indices = scores.topk(k, sorted=False).indices
    return attention(query, _gathered(keys, indices), _gathered(values, indices))


def _gathered(cached: Tensor, indices: Tensor) -> Tensor:
    """Return a copy of the rows of `[B, H_KV, N, D]` at indices `[B, H_KV, k]`."""
    if cached.device.type != "cpu":
        return cached.gather(2, indices.unsqueeze(-1).expand(*indices.shape, cached.shape[-1]))
    # Copy whole rows per head, because `gather` on a CPU copies number by number.
    copy = cached.new_empty(*indices.shape, cached.shape[-1])
    for b in range(len(cached)):
        for h in range(cached.shape[1]):
            torch.index_select(cached[b, h], 0, indices[b, h], out=copy[b, h])
    return copy
