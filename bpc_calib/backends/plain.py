"""The plain torch backend: serves everything, on any device."""

import torch
from torch import Tensor

from bpc_calib.backends.protocol import Request, Stage
from bpc_calib.method.appending import append
from bpc_calib.method.choosing import Choice, choose, rank
from bpc_calib.method.dense_attention import dense_attention
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.fitting import fit
from bpc_calib.method.paging import attend_pages, hash_into
from bpc_calib.method.scoring import QuantizedQuery, hash_scores, quantize_query
from bpc_calib.method.selection import select
from bpc_calib.method.sparse_attention import sparse_attention
from bpc_calib.method.stepping import step

__all__ = [
    "append", "attend_pages", "choose", "dense_attention", "encode_with", "fit", "hash_into",
    "popcount_scores", "quantize_query", "serves", "sparse_attention", "stages", "step",
]  # fmt: skip


def serves(request: Request) -> str | None:
    """None: plain torch serves every call."""
    return None


def stages(query: Tensor, projection: Tensor, k: int, choice: Choice) -> dict[str, Stage]:
    """The stages `project`, `score` and `select` of `choose`, each with those before it.

    Args:
        query: `[B, H_KV, G, D]`.
        projection: `[H_KV, H, D]`.
        k: number of tokens.
        choice: how to rank; what it forces is not timed.
    """

    def score(codes: Tensor, gain: Tensor | None) -> Tensor:
        rounded = quantize_query(query, projection)
        scores = hash_scores(rounded, codes, gain)
        return rank(scores, rounded.scale, group=choice.group, gain=gain is not None, scaling=choice.scaling)

    return {
        "project": lambda codes, gain: quantize_query(query, projection),
        "score": score,
        "select": lambda codes, gain: select(score(codes, gain), k),
    }


def popcount_scores(values: Tensor, codes: Tensor) -> Tensor:
    """The paper's scores, int32 `[B, H_KV, N]`, by the look-up tables of `hash_scores`.

    Args:
        values: int8 `[B, H_KV, G, H]`, of `quantize_query`.
        codes: int64 `[B, H_KV, N, W]`.
    """
    scale = torch.ones(values.shape[:2], dtype=torch.float32, device=values.device)
    return hash_scores(QuantizedQuery(values, scale), codes).amax(-2)
