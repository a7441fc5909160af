"""Pages of tokens, ranked by a bound."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.method.scoring import group_scores
from bpc_calib.method.selection import sortable
from bpc_calib.runtime.layers import RankingLayer

__all__ = ["QuestLayer"]


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
