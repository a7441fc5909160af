"""What every backend offers: the signatures of the plain torch functions, and what it can serve."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder
from bpc_calib.method.fitting import Fit
from bpc_calib.method.paging import CodePages, Fresh, Paged, Rows
from bpc_calib.method.scoring import QuantizedQuery
from bpc_calib.method.stepping import Hashed

__all__ = ["Backend", "Request", "Stage"]

# Runs the stages of `choose` up to one of them, on codes and gains.
Stage = Callable[[Tensor, Tensor | None], Any]


@dataclass(frozen=True)
class Request:
    """What a backend looks at to say whether it serves a call."""

    tensor: Tensor  # the queries [B, H_KV, G, D] or the keys [B, H_KV, N, D]
    cache: torch.Size  # [B, H_KV, N]
    heads: int = 1  # query heads per KV head
    contiguous: bool = True  # whether the last dimension of every tensor is


class Backend(Protocol):
    """A module with these functions; `dispatch` picks one for each call.

    Every function returns what the plain torch function of the same name returns: `choose` and `encode_with` bit for
    bit from the same int8 queries and products, attention within the rounding of the dtype.
    """

    def serves(self, request: Request) -> str | None:
        """Why this backend cannot compute a call; None if it can."""

    def choose(
        self,
        query: Tensor,
        projection: Tensor,
        cached: Cached,
        k: int | Tensor,
        choice: Choice,
        *,
        width: int | None = None,
    ) -> Tensor:
        """`bpc_calib.method.choosing.choose`."""

    def encode_with(self, encoder: Encoder, keys: Tensor) -> Encoded:
        """`bpc_calib.method.encoding.encode_with`."""

    def fit(
        self,
        keys: Tensor,
        bits: int = 64,
        *,
        iterations: int = 8,
        rounds: int = 0,
        metric: Tensor | None = None,
        mean: Tensor | None = None,
        weights: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Fit:
        """`bpc_calib.method.fitting.fit`."""

    def append(self, encoder: Encoder | None, key: Tensor, value: Tensor, place: Tensor, slots: Slots) -> None:
        """`bpc_calib.method.appending.append`."""

    def sparse_attention(
        self, query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scaling: float | None = None
    ) -> Tensor:
        """`bpc_calib.method.sparse_attention.sparse_attention`."""

    def dense_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        scaling: float | None = None,
        *,
        valid: Tensor | None = None,
    ) -> Tensor:
        """`bpc_calib.method.dense_attention.dense_attention`."""

    def step(self, query: Tensor, hashed: Hashed, k: int, choice: Choice) -> Tensor:
        """`bpc_calib.method.stepping.step`."""

    def hash_into(self, fresh: Fresh, pages: CodePages) -> None:
        """`bpc_calib.method.paging.hash_into`."""

    def attend_pages(
        self,
        query: Tensor,
        projection: Tensor,
        paged: Paged,
        rows: Rows,
        choice: Choice,
        *,
        gain: bool = True,
        fresh: Fresh | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`bpc_calib.method.paging.attend_pages`."""

    def stages(self, query: Tensor, projection: Tensor, k: int, choice: Choice) -> dict[str, Stage]:
        """The stages `project`, `score` and `select` of `choose`, each with those before it: for benchmarks."""

    def quantize_query(self, query: Tensor, projection: Tensor) -> QuantizedQuery:
        """`bpc_calib.method.scoring.quantize_query` for queries `[B, H_KV, G, D]`, as `choose` rounds them."""

    def popcount_scores(self, values: Tensor, codes: Tensor) -> Tensor:
        """The paper's scores, to compare with: int32 `[B, H_KV, N]`, the largest over the heads of a group.

        Args:
            values: int8 `[B, H_KV, G, 64]`, rounded queries.
            codes: int64 `[B, H_KV, N, 1]`.
        """
