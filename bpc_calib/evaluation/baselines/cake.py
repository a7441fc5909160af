"""What the end of the prompt attended to, and how its attention changed; more tokens for layers that spread it."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from bpc_calib.evaluation.baselines.apportion import apportion
from bpc_calib.evaluation.baselines.snapkv import SnapKVLayer
from bpc_calib.method.state import Rows

__all__ = ["CakeLayer"]


class CakeLayer(SnapKVLayer):
    """CAKE (Qin et al. 2025): SnapKV with a share by layer, and tokens that the attention comes back to.

    Importance is the mean over a window of 8 tokens plus 200 times the variance there, smoothed by a mean over 5
    tokens, as a mean over the group. In addition to the window, layers share the total in proportion to their
    preference: the entropy of the window's attention to the tokens before it, times the variance over the window.

    The authors decode one prompt at a time; here each sequence of a batch has its own preferences and shares. Their
    code goes on evicting during decoding; here all later tokens are kept in addition, as with SnapKV. What exceeds the
    prompt goes to the other layers in equal parts, as with them, but rounding is by largest remainders. The window is
    limited as SnapKV's, but to no less than the 2 tokens that have a variance.
    """

    WINDOW, GAMMA, TAU1, TAU2 = 8, 200, 1.0, 1.0
    MOST = 1 + GAMMA // 2  # the variance of numbers between 0 and 1 is at most 1/2

    def observe(self, query: Tensor, scaling: float | None, places: Tensor) -> None:
        if self.get_seq_length() > 2:  # otherwise the window is the prompt, and all of it is kept
            super().observe(query, scaling, places)

    def importance(self, weights: Tensor) -> Tensor:
        """As SnapKV's; and tell the other layers how much this one prefers to keep, float64 `[batch]`."""
        variance = weights.var(3)  # [batch, kv_heads, G, prompt - window]
        entropy = -(weights * (weights + 1e-10).log()).sum((1, 2, 3, 4), dtype=torch.float64)
        change = variance.sum((1, 2, 3), dtype=torch.float64)
        self.common.told[self.index] = (entropy ** (1 / self.TAU1) * change ** (1 / self.TAU2)).cpu()
        return (weights.mean(3) + self.GAMMA * variance).mean(2)

    def window(self, length: int) -> int:
        return max(2, super().window(length))

    @cached_property
    def kept_of_each(self) -> Tensor:
        """The number of tokens that are kept of each prompt, int64 `[batch]`; known once all layers have told."""
        mean, layers = super().kept(self.prompt), self.common.layers
        least, total, own = min(mean, self.window(self.prompt)), len(layers) * mean, layers.index(self.index)
        told = torch.stack([self.common.told[layer] for layer in layers], dim=1).tolist()
        return torch.tensor([apportion(total, preferences, least, self.prompt)[own] for preferences in told])

    def kept(self, length: int) -> int:
        """Return the mean over the batch, rounded down: only where each keeps all of its prompt is it the prompt."""
        return min(length, int(self.kept_of_each.sum()) // len(self.kept_of_each))

    def choose(self, query: Tensor, rows: Rows) -> Tensor:
        if self.prompt:
            k = self.kept_of_each + rows.longest - self.prompt
            rows = replace(rows, k=k.unsqueeze(-1).to(query.device), width=int(k.max()))
        return super().choose(query, rows)
