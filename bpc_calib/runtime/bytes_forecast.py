"""The bytes that a decoding step will read, from the config of a model alone."""

from typing import Any

import torch

from bpc_calib.models.description import describe
from bpc_calib.runtime.bytes_read import KVBytes
from bpc_calib.runtime.cache import BPCCache

__all__ = ["forecast_bytes"]


def forecast_bytes(config: Any, length: int, dtype: torch.dtype, **settings: Any) -> KVBytes:
    """Count what a step reads per sequence at `length` cached tokens: a `BPCCache` counts that holds no memory.

    Args:
        config: of the model.
        length: cached tokens, at least 1.
        dtype: of keys and values.
        settings: of `BPCCache`.

    Raises:
        InputError: a setting is out of range.
        ModelError: BPC cannot serve the model.
    """
    from transformers.cache_utils import DynamicLayer

    model = describe(config)
    cache = BPCCache(config, **settings)
    empty = torch.empty(1, model.kv_heads, length, model.head_dim, dtype=dtype, device="meta")
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.update(empty, empty)
    return cache.kv_parts(length)
