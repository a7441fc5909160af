"""Whether BPC can replace the cache layers of a model."""

from collections.abc import Sequence
from typing import Any

from bpc_calib.errors import ModelError
from bpc_calib.models.description import ModelDescription

__all__ = ["check_layers", "check_undoable", "with_tokens"]


def check_layers(config: Any, model: ModelDescription) -> list[Any]:
    """Return transformers' cache layers for this model, after a check that BPC can replace the full-attention ones.

    Raises:
        ModelError: layers share their keys, or a layer keeps its keys in a class that BPC does not know.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    layers = list(DynamicCache(config=config).layers)
    name = f"{model.id} ({model.model_type})"
    if len(layers) != model.num_layers:
        raise ModelError(f"{name}: some layers share their keys and values, which BPC does not serve")
    for index in model.full_layers:
        # A sliding window as large as the context is full attention.
        if type(layers[index]) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ModelError(
                f"{name}: layer {index} keeps its keys in a {type(layers[index]).__name__}, which BPC does not serve"
            )
    return layers


def with_tokens(layers: Sequence[Any]) -> list[int]:
    """Return the indices of the cache layers that keep the keys and values of tokens, in order."""
    from transformers.cache_utils import DynamicLayer

    return [index for index, layer in enumerate(layers) if isinstance(layer, DynamicLayer)]


def check_undoable(layers: Sequence[Any], what: str) -> None:
    """Raise `ModelError` unless all cache layers keep tokens alone, which can be removed."""
    if others := sorted({*range(len(layers))} - {*with_tokens(layers)}):
        kind = type(layers[others[0]]).__name__
        raise ModelError(f"layer {others[0]} keeps one state of all tokens ({kind}): {what}")
