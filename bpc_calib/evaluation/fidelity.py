"""Measure during decoding which part of full attention a choice of tokens keeps.

Every method chooses at the same steps, from the same query and the same keys, while the model itself continues with
full attention.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.evaluation.forcing import FullLayer
from bpc_calib.method.scoring import group_scores
from bpc_calib.method.selection import select, sortable
from bpc_calib.method.state import Rows, State, alike
from bpc_calib.method.step import attend
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.layers import SparseLayer

__all__ = ["METRICS", "FullAttention", "ProbeCache", "probe"]

METRICS = ("recall", "mass", "best_kept", "cosine")


class FullAttention:
    """Full attention of one step, computed once for all methods.

    Args:
        query: `[batch, kv_heads, G, head_dim]`.
        keys, values: `[batch, kv_heads, N, head_dim]`.
        scaling: factor on the products q k; None: `head_dim ** -0.5`.
    """

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None = None) -> None:
        self.query, self.keys, self.values = (
            x if x.dtype == torch.float64 else x.float() for x in (query, keys, values)
        )
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        products = self.query @ self.keys.mT
        self.weights = (products * self.scaling).softmax(-1)  # [batch, kv_heads, G, N]
        self.heaviest = products.argmax(-1)  # [batch, kv_heads, G], the token with the largest weight
        self.ranks = sortable(group_scores(products, "relative", logit=1 / self.scaling))  # of the group
        self.output = self.weights @ self.values

    def kept(self, indices: Tensor) -> Tensor:
        """Return four metrics per KV head of a choice of tokens, `[batch, kv_heads, 4]` in the order of `METRICS`.

        - recall: share of the true top-k tokens, ranked by exact products (`group_scores`, "relative"), that were
          chosen;
        - mass: share of full attention's softmax weight on the chosen tokens, mean over the group;
        - best_kept: share of the query heads whose token with the largest weight was chosen;
        - cosine: cosine similarity of the attention outputs over the chosen tokens and over all, mean over the group.

        Args:
            indices: int64 `[batch, kv_heads, width]`, the chosen tokens, without duplicates; -1 is no token. The `k` of
                a KV head is the number of its tokens.
        """
        dtype, count = self.query.dtype, self.ranks.shape[-1]
        chosen = _marked(indices, count)
        k = chosen.sum(-1)
        recall = (chosen & _marked(select(self.ranks, k), count)).sum(-1).to(dtype) / k
        mass = (self.weights * chosen.unsqueeze(-2)).sum(-1).mean(-1)
        kept = chosen.gather(-1, self.heaviest).to(dtype).mean(-1)
        rows = alike(self.keys, indices.shape[2])
        sparse = attend(self.query, State(self.keys, self.values), rows, indices, self.scaling)
        cosine = F.cosine_similarity(self.output, sparse.to(dtype), dim=-1).mean(-1)
        return torch.stack([recall, mass, kept, cosine], dim=-1)


def _marked(indices: Tensor, count: int) -> Tensor:
    """Return which of `count` tokens are in a list `[..., width]`, where -1 is no token: bool `[..., count]`."""
    marked = torch.zeros(*indices.shape[:-1], count + 1, dtype=torch.bool, device=indices.device)
    return marked.scatter_(-1, indices.where(indices >= 0, count), True)[..., :count]


class ProbeLayer(FullLayer):
    """A layer that attends to everything and measures what the layers of other methods choose from the same keys."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.probed: dict[Any, SparseLayer] = {}  # by method
        self.sums: dict[Any, Tensor] = {}  # by method: float64 [batch, kv_heads, 4], summed over the steps
        self.every = 1  # measure one step in so many
        self.steps = self.measured = 0

    def observe(self, query: Tensor, scaling: float | None, places: Tensor) -> None:
        for layer in self.probed.values():
            layer.borrow(self)
            layer.observe(query, scaling, places)

    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        if self.probed and self.steps % self.every == 0:
            full = FullAttention(query, self.keys, self.values, self.rules.scaling)
            for method, layer in self.probed.items():
                layer.borrow(self)
                counts = layer.counts(rows.longest)
                k = torch.tensor([counts], device=query.device).repeat(len(query), 1)
                _, chosen = layer.decode(query, replace(rows, k=k, width=max(counts)))
                assert chosen is not None
                metrics = full.kept(chosen).double()
                self.sums[method] = self.sums[method] + metrics if self.measured else metrics
            self.measured += 1
        self.steps += 1
        return super().decode(query, rows)


class ProbeCache(BPCCache):
    layer_class = ProbeLayer

    def asked_layers(self) -> list[int]:
        """Return the indices of the layers in which methods choose."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, ProbeLayer) and layer.probed]

    def found(self) -> dict[Any, Tensor]:
        """Return the mean `METRICS` over the measured steps, by method: float64 `[layers, batch, kv_heads, 4]`."""
        layers = [self.layers[index] for index in self.asked_layers()]
        return {
            method: torch.stack([layer.sums[method].cpu() / layer.measured for layer in layers])
            for method in layers[0].probed
        }


def probe(config: Any, caches: Mapping[Any, BPCCache], every: int = 1) -> ProbeCache:
    """Return a full-attention cache that measures the choices of the given empty caches, by method.

    It measures one step in `every`, the first step first.
    """
    cache = ProbeCache(config, budget=1.0, dense_layers=(), min_context=0)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ProbeLayer):
            layer.every = every
            for method, other in caches.items():
                if isinstance(probed := other.layers[index], SparseLayer):
                    layer.probed[method] = probed
    return cache
