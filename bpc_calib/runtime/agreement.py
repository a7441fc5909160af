"""How often sparse steps choose the token that full attention chooses: the quality of BPC on the text that runs."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["RECENT", "Agreement"]

RECENT = 64  # checks of which a fallback counts the share that agreed
ROUNDING = 2  # spacings of the logits' dtype by which passes over one and over several tokens were seen to differ


@dataclass
class Agreement:
    """Counts since the cache was made or reset; a check is one token of one sequence."""

    checked: int = 0
    agreed: int = 0
    divergences: float = 0.0  # sum over the checks, in nats
    ties: int = 0  # tokens of an exact text whose two best logits are within rounding: other kernels may swap them
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    fell_back: int | None = None  # tokens of the prompt and the text when a text went on with full attention

    @property
    def rate(self) -> float | None:
        """Share of the checks that agreed; None before the first."""
        return self.agreed / self.checked if self.checked else None

    @property
    def divergence(self) -> float | None:
        """Mean KL divergence of the sparse steps' next token from full attention's, in nats; None before the first."""
        return self.divergences / self.checked if self.checked else None

    def add(self, agrees: Tensor, sparse: Tensor, full: Tensor) -> None:
        """Count checks.

        Args:
            agrees: bool `[B]`, whether both chose the same token.
            sparse, full: logits `[B, vocab]` of the two.
        """
        ours, theirs = sparse.float().log_softmax(-1), full.float().log_softmax(-1)
        self.checked += len(agrees)
        self.agreed += int(agrees.sum())
        self.divergences += float(torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="sum"))
        self.recent.extend(agrees.tolist())

    def add_ties(self, logits: Tensor) -> None:
        """Count the ties among full attention's logits `[B, vocab]`."""
        best, second = logits.topk(2).values.double().unbind(-1)
        self.ties += int((best - second <= ROUNDING * torch.finfo(logits.dtype).eps * best.abs()).sum())

    def is_below(self, share: float) -> bool:
        """Whether fewer than this share of the last `RECENT` checks agreed; not before there were as many."""
        return len(self.recent) == RECENT and sum(self.recent) < share * RECENT
