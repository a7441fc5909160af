"""The frame of a method that scores keys: a subclass has its scores, and the bytes that they read."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from bpc_calib.method.scoring import group_scores
from bpc_calib.method.selection import sortable
from bpc_calib.runtime.layers import RankingLayer

__all__ = ["ScoringLayer", "directions"]

DERIVED_AT_ONCE = 1 << 12  # tokens: 1,500 signs need kilobytes of temporary memory per key


class ScoringLayer(RankingLayer):
    """A layer that ranks by the scores of the query heads.

    A method that learns from text beforehand also has a static method `learn(text: LayerText, seed: int)`, which
    returns tensors by name; `learned` has them, by layer.
    """

    in_products = True  # whether the unit of the scores is that of the products q k
    learned: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})
    derived = 0  # number of tokens of which `of_keys` has computed

    @abstractmethod
    def score(self, query: Tensor) -> Tensor:
        """Return a score for every key, the best the largest.

        Args:
            query: `[batch, kv_heads, G, head_dim]`.

        Returns:
            Floats `[batch, kv_heads, G, N]`.
        """

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        valid = None if visible is None else visible.unsqueeze(1)
        logit = 1 / self.scaling if self.in_products else None
        return sortable(group_scores(self.score(query), self.rules.group, valid=valid, logit=logit))

    def of_keys(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `make(keys)` for all keys; compute it only for new keys, in blocks, and store it."""
        length = self.get_seq_length()
        while self.derived < length:
            end = min(length, self.derived + DERIVED_AT_ONCE)
            self.append(name, self.derived, make(self.keys[:, :, self.derived : end]))
            self.derived = end
        return self.buffers[name][:, :, :length]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.derived = min(self.derived, self.get_seq_length())


def directions(count: int, like: Tensor, seed: int) -> Tensor:
    """Return random directions, the same for every layer and step: float32 `[count, head_dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, like.shape[-1], generator=generator).to(like.device)
