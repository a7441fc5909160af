"""Other methods that choose the attended tokens; each is a layer that replaces BPC's in the same cache.

Every method chooses one list of tokens per KV head, of the same length as BPC's. If a method is defined for a single
query head, the scores of a group are reduced to one by BPC's rule (`group_scores`), and counts of collisions by their
maximum. Each class says what differs from its paper because of that.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.method.scoring import group_scores
from bpc_calib.method.selection import sortable
from bpc_calib.method.state import Rows
from bpc_calib.runtime.layers import RankingLayer, SparseLayer

__all__ = [
    "MagicPIGLayer",
    "MagicPIGSamplingLayer",
    "OracleLayer",
    "PyramidKVLayer",
    "QuestLayer",
    "RandomLayer",
    "SignsLayer",
    "SnapKVLayer",
    "WindowLayer",
]


HASHED_AT_ONCE = 1 << 12  # tokens: 1,500 signs need kilobytes of temporary memory per key


def ranked(layer: SparseLayer, scores: Tensor, visible: Tensor | None, *, in_products: bool = True) -> Tensor:
    """Return the ranks, int32 `[batch, kv_heads, N]`, of scores.

    Args:
        layer: whose scaling and group rule count.
        scores: floats `[batch, kv_heads, G, N]`.
        visible: bool `[batch, N]`, False for padding; None: no padding.
        in_products: whether the unit of the scores is that of the products q k.
    """
    valid = None if visible is None else visible.unsqueeze(1)
    logit = 1 / layer.scaling if in_products else None
    return sortable(group_scores(scores, layer.rules.group, valid=valid, logit=logit))


class OracleLayer(RankingLayer):
    """Ranks by the exact products of query and key: the upper bound for a ranking."""

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        return ranked(self, query.float() @ self.keys.float().mT, visible)

    def ranking_bytes(self, length: int) -> int:
        return length * self.keys.shape[1] * self.keys.shape[3] * self.keys.element_size()


class RandomLayer(RankingLayer):
    """Random ranks, new at every step: the lower bound for a ranking."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.generator = torch.Generator().manual_seed((self.common.seed << 16) + self.index)

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        drawn = torch.randint(1 << 30, self.keys.shape[:3], generator=self.generator)
        return drawn.to(self.keys.device)


class WindowLayer(RankingLayer):
    """StreamingLLM (Xiao et al. 2024): the first four tokens and the newest."""

    SINKS = 4

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        length = self.get_seq_length()
        nth = torch.arange(length, device=self.keys.device) if visible is None else visible.cumsum(-1).unsqueeze(1) - 1
        return torch.where(nth < self.SINKS, length, nth).expand(self.keys.shape[:3])


class QuestLayer(RankingLayer):
    """Quest (Tang et al. 2024): pages of 16 tokens, ranked by an upper bound of `q k`.

    The bound of a page is the sum over dimensions of `max(q_d min_d, q_d max_d)`, with the extremes of its keys. Whole
    pages are chosen until the budget is full; the last page contributes its first tokens.
    """

    PAGE = 16

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        length, keys = self.get_seq_length(), self.keys.float()
        missing = torch.zeros(keys.shape[0], 1, length, 1, dtype=torch.bool, device=keys.device)
        if visible is not None:
            missing = ~visible[:, None, :, None]
        room = (0, 0, 0, -length % self.PAGE)

        def pages(beyond: float) -> Tensor:
            return F.pad(keys.masked_fill(missing, beyond), room, value=beyond).unflatten(2, (-1, self.PAGE))

        least, most = pages(math.inf).amin(3), pages(-math.inf).amax(3)
        empty = (least > most).any(-1)
        least, most = least.nan_to_num(0, 0, 0), most.nan_to_num(0, 0, 0)
        query = query.float()
        bound = query.clamp(min=0) @ most.mT + query.clamp(max=0) @ least.mT
        best = group_scores(bound, self.rules.group, valid=~empty, logit=1 / self.scaling)
        return sortable(best).repeat_interleave(self.PAGE, dim=-1)[..., :length]

    def ranking_bytes(self, length: int) -> int:
        token = self.keys.shape[1] * self.keys.shape[3] * self.keys.element_size()
        return -(-length // self.PAGE) * 2 * token


class SignsLayer(RankingLayer):
    """64 random signs per key, scored by the query's products with the same random directions."""

    BITS = 64
    derived = 0  # number of tokens whose signs are stored

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.derived = min(self.derived, self.get_seq_length())

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        directions = _normal(self.BITS, self.keys, self.common.seed)
        signs = self._derived("signs", lambda keys: torch.where(keys.float() @ directions.T >= 0, 1.0, -1.0))
        return ranked(self, query.float() @ directions.T @ signs.mT, visible, in_products=False)

    def ranking_bytes(self, length: int) -> int:
        return length * self.keys.shape[1] * -(-self.BITS // 8)

    def _derived(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `make(keys)` for all keys; compute it only for new keys, in blocks, and store it."""
        length = self.get_seq_length()
        while self.derived < length:
            end = min(length, self.derived + HASHED_AT_ONCE)
            self.append(name, self.derived, make(self.keys[:, :, self.derived : end]))
            self.derived = end
        return self.buffers[name][:, :, :length]


class MagicPIGLayer(SignsLayer):
    """MagicPIG (Chen et al. 2024): 150 tables of 10 random signs of the centred key, ranked by collisions.

    A collision is a table in which query and key have all 10 signs in common. The paper samples the keys with two or
    more collisions, so its budget depends on the data (`MagicPIGSamplingLayer`). This layer instead chooses the keys
    with the most collisions, the same number as every method. Its bytes are those of a scan of all signs.
    """

    SIGNS, TABLES = 10, 150
    BITS = SIGNS * TABLES

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        return self.collisions(query, visible).amax(-2)

    def collisions(self, query: Tensor, visible: Tensor | None) -> Tensor:
        """Return the number of tables in which a key collides with the query, int32 `[batch, kv_heads, G, N]`."""
        centre = self.centre(visible)
        tables = self._derived("tables", lambda keys: self._tables(keys.float() - centre))
        of_query = self._tables(query.float())
        return torch.stack([_count_equal(tables, of_query[:, :, g, None]) for g in range(query.shape[2])], dim=2)

    def centre(self, visible: Tensor | None) -> Tensor:
        """Return the mean of the keys cached at the first choice, float32 `[batch, kv_heads, 1, head_dim]`."""
        if "centre" not in self.buffers:
            keys = self.keys.float()
            weights = torch.ones(keys.shape[0], 1, keys.shape[2], 1, device=keys.device)
            if visible is not None:
                weights = visible[:, None, :, None].float()
            self.buffers["centre"] = (keys * weights).sum(2, keepdim=True) / weights.sum(2, keepdim=True)
        return self.buffers["centre"]

    def _tables(self, vectors: Tensor) -> Tensor:
        """Return the signs of each table as one number, int16 `[..., TABLES]`."""
        signs = vectors @ _normal(self.BITS, vectors, self.common.seed).T >= 0
        powers = 2.0 ** torch.arange(self.SIGNS, device=vectors.device)
        return (signs.float().unflatten(-1, (self.TABLES, self.SIGNS)) @ powers).short()


class MagicPIGSamplingLayer(MagicPIGLayer):
    """MagicPIG by its own rule: all keys with two or more collisions, weighted by the inverse of their probability.

    The probability of a key at angle `a` to the query is that of two or more collisions among the tables; one table
    collides with probability `p = (1 - a / pi) ^ 10`. The first 4 and the newest 64 tokens are always attended. Each
    query head samples its own keys. `attended` sums over the steps the tokens that any query head of a KV head read,
    as a mean over KV heads.
    """

    SINKS, NEWEST = 4, 64

    attended = steps = 0.0

    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        length, visible = self.get_seq_length(), rows.valid
        grouped, keys = query.float(), self.keys.float()
        drawn = self.collisions(grouped, visible) >= 2
        seen = torch.ones(keys.shape[0], length, dtype=torch.bool, device=keys.device) if visible is None else visible
        nth = seen.cumsum(-1) - 1
        always = (nth < self.SINKS) | (nth >= seen.sum(-1, keepdim=True) - self.NEWEST)
        always, seen = always[:, None, None], seen[:, None, None]
        logits = grouped @ keys.mT * self.scaling
        weighted = torch.where(always, logits, logits - self.chance(grouped, keys - self.centre(visible)).log())
        read = (drawn | always) & seen
        weights = weighted.masked_fill(~read, -math.inf).softmax(-1)
        self.attended += float(read.any(2).sum(-1).float().mean())
        self.steps += 1
        return (weights @ self.values.float()).to(query.dtype), None

    def chance(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the probability of two or more collisions, float32 `[..., G, N]`."""
        cosine = (F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).mT).clamp(-1, 1)
        p = (1 - cosine.acos() / math.pi) ** self.SIGNS
        return (1 - (1 - p) ** self.TABLES - self.TABLES * p * (1 - p) ** (self.TABLES - 1)).clamp(min=1e-9)

    def step_bytes(self, length: int, token: int) -> int:
        read = self.attended / self.steps if self.steps else length
        return round(read * token) + self.ranking_bytes(length)


class SnapKVLayer(RankingLayer):
    """SnapKV (Li et al. 2024): keeps permanently the prompt tokens that the prompt's last queries attended to.

    Importance is the attention from an observation window at the end of the prompt, as a mean over the window and the
    group, smoothed by a mean over 5 tokens. The budget applies to the prompt including its window; as in the paper,
    all later tokens are kept in addition. The window of 32 tokens is limited to half of the budget, so that a choice
    remains.
    """

    WINDOW, KERNEL = 32, 5

    prompt = 0  # length of the first step with several tokens; 0: no such step, and all tokens are kept

    def observe(self, query: Tensor, scaling: float | None, places: Tensor) -> None:
        if self.prompt:
            return
        self.prompt = length = self.get_seq_length()
        query = query[:, :, -self.window(length) :].unflatten(1, (self.keys.shape[1], -1)).float()
        window = query.shape[3]
        logits = query @ self.keys.float().unsqueeze(2).mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        later = torch.ones(window, length, dtype=torch.bool, device=query.device).triu(length - window + 1)
        weights = logits.masked_fill(later, -math.inf).softmax(-1)[..., : length - window]
        mean = weights.mean((2, 3))  # [batch, kv_heads, prompt - window]
        self.buffers["importance"] = F.avg_pool1d(mean, self.KERNEL, stride=1, padding=self.KERNEL // 2)

    def window(self, length: int) -> int:
        """Return the length of the observation window: its queries rank the prompt, and its tokens are always kept."""
        return min(self.WINDOW, max(1, super().count(length) // 2))

    def kept(self, length: int) -> int:
        """Return the number of tokens that are kept of a prompt."""
        return super().count(length)

    def count(self, length: int) -> int:
        prompt = min(self.prompt, length)
        return self.kept(prompt) + length - prompt if prompt else length

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        length = self.get_seq_length()
        importance = self.buffers["importance"]  # of the prompt without its window; at most 1
        newest = torch.arange(2, 2 + length - importance.shape[2], device=importance.device).float()
        return sortable(torch.cat([importance, newest.expand(*importance.shape[:2], -1)], dim=2))


class PyramidKVLayer(SnapKVLayer):
    """PyramidKV (Cai et al. 2024): SnapKV with more tokens in the lower layers and the same total.

    In addition to the window, the last choosing layer keeps a twentieth of the mean, and each lower one keeps more by
    equal steps. If the prompt is shorter than the share of the first layer, no other layer gets the remainder.
    """

    BETA = 20

    def kept(self, length: int) -> int:
        mean, layers = super().kept(length), self.common.layers
        if len(layers) == 1 or mean == length:
            return mean
        window = self.window(length)
        least = (mean - window) / self.BETA
        most = 2 * (mean - window) - least
        share = layers.index(self.index) / (len(layers) - 1)
        return min(length, max(1, round(window + most + (least - most) * share)))


def _count_equal(rows: Tensor, row: Tensor) -> Tensor:
    """Return the number of equal entries along the last dimension, which has at most 255 * 8: int32 `[...]`."""
    same = F.pad(rows == row, (0, -rows.shape[-1] % 8))
    # Each byte of an integer holds one of eight counts.
    eights = same.view(torch.int64).sum(-1, keepdim=True)
    return eights.view(torch.uint8).sum(-1, dtype=torch.int32)


def _normal(count: int, like: Tensor, seed: int) -> Tensor:
    """Return random directions, the same for every layer and step: float32 `[count, head_dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, like.shape[-1], generator=generator).to(like.device)
