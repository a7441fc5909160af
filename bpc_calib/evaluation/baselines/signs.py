"""Random signs of the keys."""

import torch
from torch import Tensor

from bpc_calib.evaluation.baselines.scoring import ScoringLayer, directions

__all__ = ["SignsLayer"]


class SignsLayer(ScoringLayer):
    """64 random signs per key, scored by the query's products with the same random directions."""

    BITS = 64
    in_products = False

    def score(self, query: Tensor) -> Tensor:
        across = directions(self.BITS, self.keys, self.common.seed)
        signs = self.of_keys("signs", lambda keys: torch.where(keys.float() @ across.T >= 0, 1.0, -1.0))
        return query.float() @ across.T @ signs.mT

    def ranking_bytes(self, length: int) -> int:
        return length * self.keys.shape[1] * -(-self.BITS // 8)
