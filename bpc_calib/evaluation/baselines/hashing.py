"""What the methods with learned hashes share: codes of 128 signs, and the queries and keys that they learn from."""

import math
from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from bpc_calib.evaluation.baselines.scoring import ScoringLayer
from bpc_calib.evaluation.learning import REPEATED, LayerText

__all__ = ["BITS", "Batch", "HashLayer", "best", "draw", "signs"]

BITS = 128
LEAST = 256  # keys that a query sees, where texts are long enough: among few keys there is little to rank


class HashLayer(ScoringLayer):
    """A layer that ranks by the number of equal bits; a subclass computes what the bits are the signs of."""

    in_products = False

    @abstractmethod
    def hash_queries(self, query: Tensor) -> Tensor:
        """Return a hash before its signs, float32 `[batch, kv_heads, G, BITS]` of `[batch, kv_heads, G, head_dim]`."""

    @abstractmethod
    def hash_keys(self, keys: Tensor) -> Tensor:
        """Return a hash before its signs, float32 `[batch, kv_heads, N, BITS]` of `[batch, kv_heads, N, head_dim]`."""

    def score(self, query: Tensor) -> Tensor:
        codes = self.of_keys("signs", lambda keys: signs(self.hash_keys(keys.float())).to(torch.int8))
        return signs(self.hash_queries(query.float())) @ codes.float().mT  # 2 * equal bits - BITS

    def ranking_bytes(self, length: int) -> int:
        return length * self.keys.shape[1] * (BITS // 8)


def signs(hashed: Tensor) -> Tensor:
    """Return 1 where a number is at least 0, else -1."""
    return torch.where(hashed >= 0, 1.0, -1.0)


class Batch(NamedTuple):
    """Queries of one text and its keys up to the last of them: float32, whatever the dtype of the model."""

    queries: Tensor  # [kv_heads, G, n, head_dim]
    keys: Tensor  # [kv_heads, N, head_dim]
    seen: Tensor  # int64 [n]: how many of the keys, from the first on, a query sees
    products: Tensor  # [kv_heads, G, n, N]; -inf: not seen


def draw(text: LayerText, count: int, generator: torch.Generator, every: int = 1) -> Batch:
    """Draw a text, at most `count` of its queries, none of them of the repetition, and one in `every` of its keys."""
    places = text.places.cpu()
    least = min(LEAST, (text.keys.shape[2] - REPEATED) // 2)
    usable = (places[:-REPEATED] + 1 >= least).nonzero().squeeze(-1)
    chosen = usable[torch.randperm(len(usable), generator=generator)[:count]]
    which = int(torch.randint(len(text.keys), (), generator=generator))
    first = int(torch.randint(every, (), generator=generator))
    seen = ((places[chosen] - first) // every + 1).to(text.keys.device)
    # Copies: what was made in inference mode has no part in a gradient.
    keys = text.keys[which, :, first::every][:, : int(seen.max())].to(torch.float32, copy=True)
    queries = text.queries[which][:, chosen.to(text.queries.device)].float().unflatten(0, (len(keys), -1))
    later = torch.arange(keys.shape[1], device=keys.device) >= seen[:, None]
    return Batch(queries, keys, seen, (queries @ keys.mT[:, None]).masked_fill_(later, -math.inf))


def best(batch: Batch, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys with the largest products, the largest first: a share of those that a query sees, at least 1.

    Returns:
        How many they are, int64 `[n]`; their products and their places, `[kv_heads, G, n, most]`, of which only the
        first so many count.
    """
    counts = (batch.seen * share).long().clamp(min=1)
    products, places = batch.products.topk(int(counts.max()))
    return counts, products, places
