"""Collisions in tables of random signs."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.evaluation.baselines.scoring import directions
from bpc_calib.evaluation.baselines.signs import SignsLayer
from bpc_calib.method.state import Rows

__all__ = ["MagicPIGLayer", "MagicPIGSamplingLayer"]


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
        tables = self.of_keys("tables", lambda keys: self._tables(keys.float() - centre))
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
        signs = vectors @ directions(self.BITS, vectors, self.common.seed).T >= 0
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


def _count_equal(rows: Tensor, row: Tensor) -> Tensor:
    """Return the number of equal entries along the last dimension, which has at most 255 * 8: int32 `[...]`."""
    same = F.pad(rows == row, (0, -rows.shape[-1] % 8))
    # Each byte of an integer holds one of eight counts.
    eights = same.view(torch.int64).sum(-1, keepdim=True)
    return eights.view(torch.uint8).sum(-1, dtype=torch.int32)
