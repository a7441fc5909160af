"""The first tokens and the newest."""

import torch
from torch import Tensor

from bpc_calib.runtime.layers import RankingLayer

__all__ = ["WindowLayer"]


class WindowLayer(RankingLayer):
    """StreamingLLM (Xiao et al. 2024): the first four tokens and the newest."""

    SINKS = 4

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        length = self.get_seq_length()
        nth = torch.arange(length, device=self.keys.device) if visible is None else visible.cumsum(-1).unsqueeze(1) - 1
        return torch.where(nth < self.SINKS, length, nth).expand(self.keys.shape[:3])
