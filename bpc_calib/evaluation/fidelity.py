"""How much of full attention a choice of tokens keeps, measured where the model really decodes.

Every method is asked for its choice at the same steps, with the same query and the same keys, while the model itself
goes on with full attention.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.evaluation.forcing import FullLayer
from bpc_calib.method.scoring import RELATIVE_LIMIT, group_scores
from bpc_calib.method.selection import select, sortable
from bpc_calib.method.sparse_attention import sparse_attention
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.layers import SparseLayer

__all__ = ["METRICS", "ProbeCache", "measure", "probe"]

METRICS = ("recall", "mass", "best_kept", "cosine")


def measure(query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
    """Four numbers a KV head of what a choice keeps, `[batch, kv_heads, 4]` in the order of `METRICS`.

    - recall: share of the best `k` tokens that were chosen, by the products themselves (`group_scores`, "relative");
    - mass: share of the softmax weight of full attention on the chosen tokens, mean over the group;
    - best_kept: share of the query heads whose token of largest weight was chosen;
    - cosine: between the outputs of attention over the chosen tokens and over all, mean over the group.

    Args:
        query: `[batch, kv_heads, G, head_dim]`.
        keys, values: `[batch, kv_heads, N, head_dim]`.
        indices: int64 `[batch, kv_heads, k]`, the tokens chosen, all different.
        scale: of the products; `head_dim ** -0.5` if None.
    """
    query, keys, values = (x if x.dtype == torch.float64 else x.float() for x in (query, keys, values))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    products = query @ keys.mT
    weights = (products * scale).softmax(-1)
    chosen = torch.zeros(products.shape[:2] + products.shape[3:], dtype=torch.bool, device=query.device)
    chosen.scatter_(-1, indices, True)
    ideal = group_scores(products, "relative", limit=RELATIVE_LIMIT / scale)
    best = select(sortable(ideal), indices.shape[-1])
    recall = chosen.gather(-1, best).to(query.dtype).mean(-1)
    mass = (weights * chosen.unsqueeze(-2)).sum(-1).mean(-1)
    kept = chosen.gather(-1, products.argmax(-1)).to(query.dtype).mean(-1)
    full, sparse = weights @ values, sparse_attention(query, keys, values, indices, scale)
    cosine = F.cosine_similarity(full, sparse.to(full.dtype), dim=-1).mean(-1)
    return torch.stack([recall, mass, kept, cosine], dim=-1)


class ProbeLayer(FullLayer):
    """Attends to everything, and asks other layers what they would choose of the same keys."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: dict[Any, SparseLayer] = {}
        self.sums: dict[Any, Tensor] = {}  # float64 [batch, kv_heads, 4] a method, over the steps
        self.steps = 0

    def count_chosen(self, visible: Tensor | None) -> int:
        return self.get_seq_length()

    def observe(self, query: Tensor, scale: float | None) -> None:
        for layer in self.asked.values():
            layer.borrow(self)
            layer.observe(query, scale)

    def attend(self, query: Tensor, k: int | Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
        self.scaling = self.scaling if scale is None else scale
        grouped = query.squeeze(2).unflatten(1, (self.keys.shape[1], -1))
        length = self.get_seq_length()
        for method, layer in self.asked.items():
            layer.borrow(self)
            indices = layer.choose(grouped, layer.count(length), visible)
            found = measure(grouped, self.keys, self.values, indices, scale).double()
            self.sums[method] = self.sums[method] + found if self.steps else found
        self.steps += 1
        return super().attend(query, length, visible, scale)


class ProbeCache(BPCCache):
    layer_class = ProbeLayer

    def asked_layers(self) -> list[int]:
        """The layers in which methods choose."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, ProbeLayer) and layer.asked]

    def found(self) -> dict[Any, Tensor]:
        """float64 `[layers that choose, batch, kv_heads, 4]` of every method: means over the steps, as `METRICS`."""
        layers = [self.layers[index] for index in self.asked_layers()]
        return {
            method: torch.stack([layer.sums[method].cpu() / layer.steps for layer in layers])
            for method in layers[0].asked
        }


def probe(config: Any, caches: Mapping[Any, BPCCache]) -> ProbeCache:
    """A cache of full attention that measures the layers of empty caches, each under its name."""
    cache = ProbeCache(config, budget=1.0, dense_layers=())
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ProbeLayer):
            for method, other in caches.items():
                if isinstance(asked := other.layers[index], SparseLayer):
                    layer.asked[method] = asked
    return cache
