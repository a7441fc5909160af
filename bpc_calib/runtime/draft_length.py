"""How many tokens to draft before one pass of full attention verifies them: as many as make the speed largest."""

from collections import deque
from dataclasses import dataclass, field

from bpc_calib.method.defaults import MOST_DRAFTED

__all__ = ["Pace", "rounds_tokens"]

FIRST = 4  # tokens of a draft before anything is known
KEPT = 5  # measurements; the shortest counts, as other processes make steps only longer
FORGET = 0.98  # weight of earlier drafted tokens for each new one


def rounds_tokens(acceptance: float, count: int) -> float:
    """Return the expected tokens of a round with `count` drafted ones: those before the first rejection, and one."""
    return count + 1.0 if acceptance >= 1 else (1 - acceptance ** (count + 1)) / (1 - acceptance)


@dataclass
class _Kind:
    """The newest seconds of one kind of step."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    waits: int = 0  # steps of the other kind since

    def saw(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.waits = 0

    def is_due(self) -> bool:
        """Whether to measure it again: after 4 steps of the other kind, as first ones may be slow; later 64."""
        return self.waits >= 2 << len(self.seconds)


@dataclass
class Pace:
    """What was measured so far, and what it says."""

    right: float = 0.8 * FIRST  # drafted tokens that were right, the newest count most
    offered: float = 1.0 * FIRST
    dense: _Kind = field(default_factory=_Kind)  # a pass of full attention over one token
    sparse: _Kind = field(default_factory=_Kind)  # a sparse step
    more: _Kind = field(default_factory=_Kind)  # what each drafted token adds to a pass of full attention

    def choose(self, limit: int) -> int:
        """Return how many tokens to draft, at most `limit`; 0: drafts do not pay, or a plain step is to be measured."""
        limit = min(limit, MOST_DRAFTED)
        if not self.dense.seconds:
            return 0
        if not self.sparse.seconds:
            return min(FIRST, limit)
        rate = self.right / self.offered
        dense, sparse, more = (min(kind.seconds) for kind in (self.dense, self.sparse, self.more))

        def speed(count: int) -> float:
            return rounds_tokens(rate, count) / (dense + count * (sparse + more))

        best = max(range(limit + 1), key=speed)
        if best:
            return 0 if self.dense.is_due() else best
        return min(FIRST, limit) if self.sparse.is_due() else 0

    def saw(self, count: int, drafting: float, verifying: float) -> None:
        """Take the seconds of drafting `count` tokens, maybe none, and of the pass of full attention behind them."""
        if not count or not self.dense.seconds:
            self.dense.saw(verifying)
            self.sparse.waits += 1
            return
        self.sparse.saw(drafting / count)
        self.more.saw(max(0.0, (verifying - min(self.dense.seconds)) / count))
        self.dense.waits += 1

    def saw_token(self, right: bool) -> None:
        """Take whether a drafted token was right."""
        self.right, self.offered = FORGET * self.right + right, FORGET * self.offered + 1
