"""Settings that all layers of a cache share: the number of attended tokens and the ranking."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.method.budget import attended
from bpc_calib.method.codes import check_bits
from bpc_calib.method.scoring import check_group

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
    """The checked arguments of `BPCCache` that every layer needs."""

    budget: float | int
    min_tokens: int
    safeguard: float
    recent: int
    sink: int
    group: str
    gain: bool
    bits: int
    seed: int
    min_context: int = 0  # a sequence with fewer tokens attends to all of them
    layers: tuple[int, ...] = ()  # indices of the layers that choose tokens

    def __post_init__(self) -> None:
        """Raise `InputError` for the first value out of range."""
        attended(1, self.budget)
        for name, least in (("min_tokens", 1), ("recent", 0), ("sink", 0), ("seed", 0), ("min_context", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be an integer of at least {least}, not {value!r}")
        if (
            isinstance(self.safeguard, bool)
            or not isinstance(self.safeguard, int | float)
            or not 0 <= self.safeguard <= 1
        ):
            raise InputError(f"safeguard must be a share in [0, 1], not {self.safeguard!r}")
        check_group(self.group)
        if not isinstance(self.gain, bool):
            raise InputError(f"gain must be True or False, not {self.gain!r}")
        if self.seed >= 1 << 63:
            raise InputError(f"seed must be below 2^63, not {self.seed}")
        check_bits(self.bits)

    @property
    def words(self) -> int:
        """The 64-bit words of a code."""
        return -(-self.bits // 64)

    def count(self, length: int) -> int:
        """Return the number of attended tokens at `length` tokens."""
        return length if length < self.min_context else attended(length, self.budget, self.min_tokens)

    def most(self, limit: int) -> int:
        """Return the largest number of attended tokens at up to `limit` tokens."""
        return max(self.count(limit), self.count(min(limit, max(0, self.min_context - 1))))


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
