"""Attach a cache layer to its keys, so that BPC's attention, which receives only the keys, can find the layer."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["AttentionCall", "layer_of", "with_layer"]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call that transformers makes to a model's attention."""

    module: Any
    query: Tensor  # [batch, query_heads, new, head_dim]
    mask: Any  # in the form that the model's own attention uses
    scale: float | None  # factor on the products q k; None: head_dim ** -0.5
    window: int | None  # length of the sliding window; None: full attention
    positions: Tensor | None  # [batch, new]


def with_layer(keys: Tensor, layer: Any) -> Tensor:
    """Return a view of the keys that carries the layer that cached them.

    Setting the attribute on the stored tensor itself would create a reference cycle that keeps the cache alive.
    """
    view = keys[:]
    view.bpc_layer = layer  # type: ignore[attr-defined]
    return view


def layer_of(keys: Tensor) -> Any:
    """Return the layer, with a method `attention`, that `with_layer` attached; None for keys of any other cache."""
    return getattr(keys, "bpc_layer", None)
