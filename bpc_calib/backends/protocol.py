"""What a backend offers: eight functions, the same as those of `bpc_calib.method`, and the oracle is there."""

from typing import Protocol

import torch
from torch import Tensor

from bpc_calib.method.codebook import Codebook
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.fitting import Fit
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State

__all__ = ["Backend"]


class Backend(Protocol):
    """A module with these functions; `dispatch.find` picks one.

    Codes and the tokens chosen are those of plain torch bit for bit, from the same int8 queries and products; attention
    is, within the rounding of the dtype.
    """

    def serves(self, tensor: Tensor, state: State | None = None) -> str | None:
        """Why this backend cannot compute a call; None if it can.

        Args:
            tensor: with a state the queries `[B, H_KV, G, D]`, else the keys to hash or to fit to, `[B, H_KV, N, D]`.
            state: what the layer cached.
        """

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

    def encode_with(self, codebook: Codebook, keys: Tensor) -> Encoded:
        """`bpc_calib.method.encoding.encode_with`."""

    def append(self, state: State, codebook: Codebook | None, key: Tensor, value: Tensor | None, at: Tensor) -> None:
        """`bpc_calib.method.step.append`."""

    def sparse_decode(
        self,
        query: Tensor,
        codebook: Codebook,
        state: State,
        rows: Rows,
        rules: Rules,
        *,
        fresh: int = 0,
        key: Tensor | None = None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`bpc_calib.method.step.sparse_decode`."""

    def choose(self, query: Tensor, codebook: Codebook, state: State, rows: Rows, rules: Rules) -> Tensor:
        """`bpc_calib.method.step.choose`."""

    def attend(self, query: Tensor, state: State, rows: Rows, indices: Tensor, scaling: float | None = None) -> Tensor:
        """`bpc_calib.method.step.attend`."""

    def dense_decode(
        self, query: Tensor, state: State, rows: Rows, scaling: float | None = None, *, new: int = 1
    ) -> Tensor:
        """`bpc_calib.method.step.dense_decode`."""
