"""The paper's pipeline on a CPU: an int8 query, popcount scores, top-k, a gathered copy, attention on the copy."""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from bpc_calib.bench.dense import Dense, folded, matmul, split
from bpc_calib.method.scoring import QuantizedQuery, hash_scores, quantize_query

__all__ = ["forms", "paper_step", "scorer"]

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]


def forms(device: torch.device) -> dict[str, Step]:
    """Each takes a query, a projection, codes, keys, values and `k`, and returns `[B, H_KV, G, D]`."""
    if device.type == "cuda":
        try:
            from bpc_calib.backends.triton.paper import paper_step as in_triton
        except ImportError:
            return {"plain torch": functools.partial(paper_step, folded)}
        return {
            "Triton popcount, SDPA": in_triton,
            "Triton popcount, split-KV (ours)": functools.partial(in_triton, attention=split()),
        }
    name = scorer()[0]
    return {
        f"{name}, SDPA": functools.partial(paper_step, folded),
        f"{name}, matmul": functools.partial(paper_step, matmul),
    }


def scorer() -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """What scores int8 `[B, H_KV, G, 64]` with codes `[B, H_KV, N, 1]`, the largest of a group; and its name."""
    try:
        return "numba popcount", importlib.import_module("bpc_calib.backends.cpu.paper").popcount_scores
    except ImportError:
        return "plain torch", _plain_scores


def paper_step(
    attention: Dense, query: Tensor, projection: Tensor, codes: Tensor, keys: Tensor, values: Tensor, k: int
) -> Tensor:
    """Attention `[B, H_KV, G, D]` over the `k` best keys of `[B, H_KV, N, D]`; the copy is made row by row."""
    scores = scorer()[1](quantize_query(query, projection).values, codes)
    indices = scores.topk(k, sorted=False).indices
    return attention(query, *(_gathered(each, indices) for each in (keys, values)))


def _gathered(cached: Tensor, indices: Tensor) -> Tensor:
    """Whole rows of `[B, H_KV, N, D]`, a head at a time: `gather` would copy number by number."""
    copy = cached.new_empty(*indices.shape, cached.shape[-1])
    for b in range(len(cached)):
        for h in range(cached.shape[1]):
            torch.index_select(cached[b, h], 0, indices[b, h], out=copy[b, h])
    return copy


def _plain_scores(values: Tensor, codes: Tensor) -> Tensor:
    scale = torch.ones(values.shape[:2], device=values.device)
    return hash_scores(QuantizedQuery(values, scale), codes).amax(-2)
