"""How many tokens a decoding step attends to, and which."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import BUDGET, DENSE_LAYERS, MIN_TOKENS
from bpc_calib.method.numbers import check_count, check_flag
from bpc_calib.method.scoring import GROUPS, check_group
from bpc_calib.method.shares import LEAST, LEVELS, LONG_FROM, Shares, counts, most, rounded, share_out

__all__ = ["Ranking", "Rules", "default_dense_layers", "ranking_defaults", "shares_of", "spread"]

Numbers = TypeVar("Numbers", Tensor, NDArray[np.int64])


class Ranking(TypedDict, total=False):
    """How tokens are ranked and which are always attended; None: the default of the artifact's method."""

    safeguard: float | None
    recent: int | None
    sink: int | None
    group: str | None
    gain: bool | None


@dataclass(frozen=True)
class Rules:
    """The rules of a decoding step, checked; those of the layers of a cache differ in their shares alone.

    `sparse_decode` reads all but the first three and the shares, which give the numbers in `Rows.k`.
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
    shares: Shares | None = None  # of the KV heads (`share_out`); None: all attend to as many tokens

    def __post_init__(self) -> None:
        """Raise `InputError` for the first value out of range."""
        attended(1, self.budget)
        for name, least in (("min_tokens", 1), ("recent", 0), ("sink", 0), ("min_context", 0)):
            check_count(name, getattr(self, name), least)
        share = self.safeguard
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InputError(f"safeguard must be a share in [0, 1], not {share!r}")
        check_group(self.group)
        check_flag("gain", self.gain)

    def count(self, length: int) -> int:
        """Return the number of attended tokens at `length` tokens, the mean of all KV heads of all layers."""
        return length if length < self.min_context else attended(length, self.budget, self.min_tokens)

    def by_head(self, mean: int, length: int) -> tuple[int, ...]:
        """Return how many of `length` tokens each KV head attends to for a mean; one number where all have the same."""
        return (mean,) if self.shares is None else counts(mean, length, self.shares)

    def most(self, limit: int) -> int:
        """Return a bound of the number of tokens that a KV head attends to at up to `limit` tokens."""
        mean = max(self.count(limit), self.count(min(limit, max(0, self.min_context - 1))))
        return mean if self.shares is None else most(mean, limit, self.shares)

    def scale(self, head_dim: int) -> float:
        """Return attention's factor on the products of queries and keys with so many dimensions."""
        return head_dim**-0.5 if self.scaling is None else self.scaling


def default_dense_layers(artifact: ProjectionArtifact | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers that attend to everything: the first two, or none where the needs of the heads are known."""
    known = artifact is not None and artifact.has_needs
    return () if known else tuple(layer for layer in DENSE_LAYERS if layer < num_layers)


def shares_of(artifact: ProjectionArtifact | None, layers: Iterable[int]) -> dict[int, Shares]:
    """Return the shares of the KV heads of the layers that choose, for `Rules.shares`.

    Args:
        artifact: with the needs of all heads; None, or without them: no shares.
        layers: indices of the layers that choose; the budget is the mean over all their heads.
    """
    if artifact is None or not artifact.has_needs:
        return {}
    chosen = replace(artifact, layers={layer: artifact.layers[layer] for layer in layers})
    return share_out(chosen.by_layer("need"), chosen.by_layer("need_short") or None)


def spread(mean: Numbers, length: Numbers, shares: Numbers) -> Numbers:
    """Return the `counts` of several sequences on their device, without waiting for it: int64 `[layers, B, H_KV]`.

    All are tensors, or all are NumPy arrays, whose calls take less time on a CPU.

    Args:
        mean: int64 `[B]`.
        length: int64 `[B]`, below 2^31.
        shares: int64 `[layers, 2 LEVELS, H_KV]`.
    """
    levels = torch.arange(LEVELS, device=mean.device) if isinstance(mean, Tensor) else np.arange(LEVELS)
    ratio = (length * length) // (mean * mean).clip(min=1)
    row = (ratio[:, None] >= 1 << levels).sum(-1) - 1 + LEVELS * (length < LONG_FROM)
    mean, length = mean[:, None], length[:, None]
    least = mean.clip(max=LEAST)
    count = least + rounded((mean - least) * shares[:, row])
    return count.clip(min=(mean >= length) * length, max=length)


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
