"""How many tokens a decoding step attends to, and which."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import BUDGET, MIN_TOKENS
from bpc_calib.method.scoring import GROUPS, check_group

__all__ = ["Ranking", "Rules", "ranking_defaults"]


class Ranking(TypedDict, total=False):
    """How tokens are ranked and which are always attended; None: the default of the artifact's method."""

    safeguard: float | None
    recent: int | None
    sink: int | None
    group: str | None
    gain: bool | None


@dataclass(frozen=True)
class Rules:
    """The rules of a decoding step, checked; the same for all layers of a cache.

    `sparse_decode` reads all but the first three, which give the numbers in `Rows.k`.
    """

    budget: float | int = BUDGET  # share of the tokens in (0, 1], or a number of tokens
    min_tokens: int = MIN_TOKENS  # lower bound of the number of attended tokens
    min_context: int = 0  # a sequence with fewer tokens attends to all of them
    recent: int = 0  # newest tokens, always attended
    sink: int = 0  # first tokens, always attended
    group: str = GROUPS[0]  # as in `group_scores`
    safeguard: float = 0.0  # largest share of k for the tokens of `State.worst`
    gain: bool = True  # whether scores include the gain, where it is kept
    scaling: float | None = None  # attention's factor on the products q k, the size of one logit; None: D ** -0.5

    def __post_init__(self) -> None:
        """Raise `InputError` for the first value out of range."""
        attended(1, self.budget)
        for name, least in (("min_tokens", 1), ("recent", 0), ("sink", 0), ("min_context", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be an integer of at least {least}, not {value!r}")
        share = self.safeguard
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InputError(f"safeguard must be a share in [0, 1], not {share!r}")
        check_group(self.group)
        if not isinstance(self.gain, bool):
            raise InputError(f"gain must be True or False, not {self.gain!r}")

    def count(self, length: int) -> int:
        """Return the number of attended tokens at `length` tokens."""
        return length if length < self.min_context else attended(length, self.budget, self.min_tokens)

    def most(self, limit: int) -> int:
        """Return the largest number of attended tokens at up to `limit` tokens."""
        return max(self.count(limit), self.count(min(limit, max(0, self.min_context - 1))))

    def scale(self, head_dim: int) -> float:
        """Return attention's factor on the products of queries and keys with so many dimensions."""
        return head_dim**-0.5 if self.scaling is None else self.scaling


def ranking_defaults(artifact: ProjectionArtifact | None) -> dict[str, Any]:
    """Return the default `Ranking`: that of the paper for projections of its method, else BPC's own.

    Raises:
        InputError: `artifact` is neither None nor a `ProjectionArtifact`.
    """
    if artifact is not None and not isinstance(artifact, ProjectionArtifact):
        raise InputError(f"artifact must be what bpc_artifacts.load returns, not {type(artifact).__name__}")
    if artifact is not None and artifact.metadata["algorithm"]["name"] == "paper":
        return {"safeguard": 0.1, "recent": 1, "sink": 0, "group": "max", "gain": False}
    return {"safeguard": 0.0, "recent": 0, "sink": 0, "group": "relative", "gain": True}
