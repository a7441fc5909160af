"""As many tokens as a share of the attention weight needs, by the estimates of BPC's codes."""

from dataclasses import replace

import torch
from torch import Tensor

from bpc_calib.method.encoded import GAIN_UNIT
from bpc_calib.method.scoring import hash_scores, quantize_query
from bpc_calib.method.state import Rows, within
from bpc_calib.runtime.hashed_layer import BPCLayer

__all__ = ["TwilightLayer", "TwilightOwnLayer"]


class TwilightOwnLayer(BPCLayer):
    """Twilight (Lin et al. 2025): the fewest tokens whose attention weights sum to `P`, anew at every step.

    The paper estimates weights from keys of 4 bits, among tokens that another method has chosen; here BPC's codes
    estimate the weights of all tokens. A KV head needs what the mean of its query heads' weights needs. `attended` sums
    over the steps the tokens that were attended, as a mean over KV heads.
    """

    P = 0.95  # of the paper, for Llama 3.1

    attended = steps = 0.0

    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        self.hash(rows.valid)
        k = self.needed(self.sums(query, rows), rows).clamp(min=self.rules.recent + self.rules.sink + 1)
        self.attended += float(k.float().mean())
        self.steps += 1
        return super().decode(query, replace(rows, k=k, width=int(k.max())))

    def sums(self, query: Tensor, rows: Rows) -> Tensor:
        """Return the estimated weight of the 1, 2, ... heaviest tokens of each KV head: `[batch, kv_heads, N]`."""
        assert self.codebook is not None
        asked, state = quantize_query(query, self.codebook.projection, nibbles=self.codebook.nibbles), self.state()
        assert state.codes is not None
        gain = None if state.gain is None else state.gain[:, :, : rows.longest]
        scores = hash_scores(asked, state.codes[:, :, : rows.longest], gain)
        logits = scores * (asked.scale * self.scaling / (1 if gain is None else GAIN_UNIT))[..., None, None]
        weights = logits.masked_fill(~within(rows)[:, None, None], -torch.inf).softmax(-1).mean(2)
        return weights.sort(-1, descending=True).values.cumsum(-1)

    def needed(self, sums: Tensor, rows: Rows) -> Tensor:
        """Return how many tokens each KV head attends to, int64 `[batch, kv_heads]`."""
        return _reaching(sums, sums.new_full((len(sums),), self.P))

    def step_bytes(self, length: int, token: int) -> int:
        read = self.attended / self.steps if self.steps else length
        return round(read * token) + self.ranking_bytes(length)


class TwilightLayer(TwilightOwnLayer):
    """Twilight with a given number of tokens: in every step the KV heads of a layer share them by one weight to reach.

    So a head with a flat distribution attends to more tokens than one with a peak, and all together to BPC's number.
    """

    def needed(self, sums: Tensor, rows: Rows) -> Tensor:
        total = rows.k.expand(sums.shape[:2]).sum(-1)
        low, high = torch.zeros(len(sums), device=sums.device), torch.ones(len(sums), device=sums.device)
        for _ in range(24):  # as exact as float32
            middle = (low + high) / 2
            fits = _reaching(sums, middle).sum(-1) <= total
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
        return _reaching(sums, low)


def _reaching(sums: Tensor, share: Tensor) -> Tensor:
    """Return how many tokens it takes for sums `[batch, kv_heads, N]` to reach `share [batch]`: `[batch, kv_heads]`."""
    return (sums < share[:, None, None]).sum(-1).add(1).clamp(max=sums.shape[-1])
