"""What the end of the prompt attended to."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.method.selection import sortable
from bpc_calib.runtime.layers import RankingLayer

__all__ = ["SnapKVLayer", "attention"]


class SnapKVLayer(RankingLayer):
    """SnapKV (Li et al. 2024): keeps permanently the prompt tokens that the prompt's last queries attended to.

    Importance is the attention from an observation window at the end of the prompt, as a mean over the window and the
    group, smoothed by a mean over 5 tokens. The budget applies to the prompt including its window; as in the paper,
    all later tokens are kept in addition. The window of 32 tokens is limited to half of the budget, so that a choice
    remains.
    """

    WINDOW, KERNEL = 32, 5
    MOST = 1  # no importance is larger

    prompt = 0  # length of the first step with several tokens; 0: no such step, and all tokens are kept

    def observe(self, query: Tensor, scaling: float | None, places: Tensor) -> None:
        if self.prompt:
            return
        self.prompt = length = self.get_seq_length()
        query, places = query[:, :, -self.window(length) :], places[-self.window(length) :]
        weights = attention(query, places, self.keys, scaling)[..., : length - len(places)]
        importance = self.importance(weights)
        self.buffers["importance"] = F.avg_pool1d(importance, self.KERNEL, stride=1, padding=self.KERNEL // 2)

    def importance(self, weights: Tensor) -> Tensor:
        """Return the importance of the tokens before the window, `[batch, kv_heads, prompt - window]`, not smoothed.

        Args:
            weights: of the window's queries, `[batch, kv_heads, G, window, prompt - window]`.
        """
        return weights.mean((2, 3))

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
        importance = self.buffers["importance"]  # of the prompt without its window
        newest = self.MOST + torch.arange(1, 1 + length - importance.shape[2], device=importance.device).float()
        return sortable(torch.cat([importance, newest.expand(*importance.shape[:2], -1)], dim=2))


def attention(query: Tensor, places: Tensor, keys: Tensor, scaling: float | None) -> Tensor:
    """Return how tokens attend to all tokens up to them: float32 `[batch, kv_heads, G, n, N]`.

    Args:
        query: `[batch, query_heads, n, head_dim]`.
        places: int64 `[n]`, the tokens of the queries.
        keys: `[batch, kv_heads, N, head_dim]`.
        scaling: factor on the products q k; None: `head_dim ** -0.5`.
    """
    query = query.unflatten(1, (keys.shape[1], -1)).float()
    logits = query @ keys.float().unsqueeze(2).mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    later = torch.arange(keys.shape[2], device=keys.device) > places.to(keys.device).unsqueeze(-1)
    return logits.masked_fill(later, -math.inf).softmax(-1)
