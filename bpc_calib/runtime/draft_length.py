"""How many tokens to draft before one pass of full attention verifies them: as many as make the speed largest."""

from dataclasses import dataclass

from bpc_calib.method.defaults import MOST_DRAFTED

__all__ = ["Pace", "rounds_tokens"]

FIRST = 4  # tokens of a draft before anything is known
PROBE = 64  # plain steps after which a draft is tried again
NEW = 0.2  # weight of a new measurement
FORGET = 0.98  # weight of earlier drafted tokens for each new one


def rounds_tokens(acceptance: float, count: int) -> float:
    """Return the expected tokens of a round with `count` drafted ones: those before the first rejection, and one."""
    return count + 1.0 if acceptance >= 1 else (1 - acceptance ** (count + 1)) / (1 - acceptance)


@dataclass
class Pace:
    """What was measured so far, in seconds, and what it says."""

    right: float = 0.8 * FIRST  # drafted tokens that were right, the newest count most
    offered: float = 1.0 * FIRST
    dense: float | None = None  # a pass of full attention over one token
    sparse: float | None = None  # a sparse step
    more: float = 0.0  # what each drafted token adds to a pass of full attention
    plain: int = 0  # plain steps since the last draft

    def choose(self, limit: int) -> int:
        """Return how many tokens to draft, at most `limit`; 0: drafts do not pay, or a plain step was not measured."""
        limit = min(limit, MOST_DRAFTED)
        if self.dense is None:
            return 0
        if self.sparse is None or self.plain >= PROBE:
            return min(FIRST, limit)
        rate, sparse, dense = self.right / self.offered, self.sparse, self.dense

        def speed(count: int) -> float:
            seconds = dense + count * (sparse + self.more)
            return rounds_tokens(rate, count) / seconds

        return max(range(limit + 1), key=speed)

    def saw(self, count: int, drafting: float, verifying: float) -> None:
        """Take the seconds of drafting `count` tokens, maybe none, and of the pass of full attention behind them."""
        if not count or self.dense is None:
            self.dense, self.plain = _mixed(self.dense, verifying), self.plain + 1
            return
        self.sparse, self.plain = _mixed(self.sparse, drafting / count), 0
        self.more = max(0.0, _mixed(self.more or None, (verifying - self.dense) / count))

    def saw_token(self, right: bool) -> None:
        """Take whether a drafted token was right."""
        self.right, self.offered = FORGET * self.right + right, FORGET * self.offered + 1


def _mixed(before: float | None, new: float) -> float:
    return new if before is None else (1 - NEW) * before + NEW * new
