"""Whether BPC can replace the cache layers of a model."""

from typing import Any

from bpc_calib.errors import ModelError
from bpc_calib.models.description import ModelDescription

__all__ = ["check_layers"]


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
