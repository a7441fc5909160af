"""What the end of the prompt attended to."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.method.selection import sortable
from bpc_calib.runtime.layers import RankingLayer

__all__ = ["SnapKVLayer"]


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
