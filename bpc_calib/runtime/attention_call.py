"""How BPC's attention, which transformers calls with keys alone, finds the layer that cached them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["AttentionCall", "layer_of", "with_layer"]


@dataclass(frozen=True)
class AttentionCall:
    """One call of a model's attention by transformers."""

    module: Any
    query: Tensor  # [batch, query_heads, new, head_dim]
    mask: Any  # in the form of any implementation
    scale: float | None  # of the products; None is head_dim ** -0.5
    window: int | None  # of sliding attention
    positions: Tensor | None  # [batch, new]


def with_layer(keys: Tensor, layer: Any) -> Tensor:
    """A view of the keys that leads BPC's attention to the layer that cached them.

    On the stored tensor itself the attribute would be a cycle that keeps the cache alive.
    """
    view = keys[:]
    view.bpc_layer = layer  # type: ignore[attr-defined]
    return view


def layer_of(keys: Tensor) -> Any:
    """The layer that `with_layer` put on these keys, with a method `attention`; None for keys of any other cache."""
    return getattr(keys, "bpc_layer", None)
