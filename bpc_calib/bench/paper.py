"""The paper's pipeline: an int8 query, popcount scores, top-k, a gathered copy, attention on the copy."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.bench.dense import Dense, folded, matmul, split

__all__ = ["forms", "paper_step"]

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]

SCORERS = {"triton": "Triton popcount", "numba": "numba popcount", "torch": "plain torch"}


def forms(device: torch.device) -> dict[str, Step]:
    """Functions of a query, a projection, codes, keys, values and `k` that return `[B, H_KV, G, D]`, by name."""
    backend = dispatch.backend(device)
    if backend == "triton":
        attentions: dict[str, Dense] = {"SDPA": folded, "split-KV (ours)": split(device)}
    else:
        attentions = {"SDPA": folded, "matmul": matmul}
    return {
        f"{SCORERS[backend]}, {name}": functools.partial(paper_step, attention)
        for name, attention in attentions.items()
    }


def paper_step(
    attention: Dense, query: Tensor, projection: Tensor, codes: Tensor, keys: Tensor, values: Tensor, k: int
) -> Tensor:
    """Attention `[B, H_KV, G, D]` over the `k` best keys of `[B, H_KV, N, D]` by score.

    Everything about it is as fast as its steps allow: this package's own kernels round the query and score, the top k
    stay unsorted, and the group is folded into the length of the query, so that `attention` reads the copy once.
    """
    backend = dispatch.find(query.device)
    scores = backend.popcount_scores(backend.quantize_query(query, projection).values, codes)
    indices = scores.topk(k, sorted=False).indices
    return attention(query, *(_gathered(each, indices) for each in (keys, values)))


def _gathered(cached: Tensor, indices: Tensor) -> Tensor:
    """The rows of `[B, H_KV, N, D]` at indices `[B, H_KV, k]`."""
    if cached.device.type != "cpu":
        return cached.gather(2, indices.unsqueeze(-1).expand(*indices.shape, cached.shape[-1]))
    # Whole rows, a head at a time: on a CPU `gather` copies number by number.
    copy = cached.new_empty(*indices.shape, cached.shape[-1])
    for b in range(len(cached)):
        for h in range(cached.shape[1]):
            torch.index_select(cached[b, h], 0, indices[b, h], out=copy[b, h])
    return copy
