"""The best and the worst ranking that there is."""

from typing import Any

import torch
from torch import Tensor

from bpc_calib.evaluation.baselines.scoring import ScoringLayer
from bpc_calib.runtime.layers import RankingLayer

__all__ = ["OracleLayer", "RandomLayer"]


class OracleLayer(ScoringLayer):
    """Ranks by the exact products of query and key: the upper bound for a ranking."""

    def score(self, query: Tensor) -> Tensor:
        return query.float() @ self.keys.float().mT

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
