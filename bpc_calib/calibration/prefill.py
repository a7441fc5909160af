"""How a sample goes through the model: at once, or in chunks with a cache, whichever needs clearly less memory.

The choice is by count, not by the free memory: chunks change the last bits of the keys.
"""

from itertools import pairwise
from typing import Any

from bpc_calib.models.description import ModelDescription

__all__ = ["CHUNK", "chunk_edges", "pass_bytes"]

CHUNK = 2048  # tokens; the size decides the rounding, so it is part of the method


def chunk_edges(model: Any, description: ModelDescription, length: int) -> list[tuple[int, int]]:
    """Return the first and last + 1 token of each pass over a sample of `length` tokens."""
    whole, chunked = pass_bytes(model.config.get_text_config(decoder=True), description, length, model.dtype.itemsize)
    if chunked > whole / 2:
        return [(0, length)]
    return list(pairwise([*range(0, length, CHUNK), length]))


def pass_bytes(text: Any, description: ModelDescription, length: int, itemsize: int) -> tuple[int, int]:
    """Return the memory of a pass over a sample at once, and in chunks, without the weights.

    At once, it is that of one layer's activations, and for sliding windows a mask of `length` by `length`: a byte per
    pair, and its copy in the dtype of the scores. In chunks, the full-attention layers need a cache and every layer a
    mask of `CHUNK` by `length`.
    """
    hidden, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations = (6 * hidden + 3 * inner) * itemsize
    window = getattr(text, "sliding_window", None) or 0
    slides = "sliding_attention" in description.layer_types and window < length
    mask = length * (1 + itemsize)
    whole = length * activations + (length * mask if slides else 0)
    if length <= CHUNK or set(description.layer_types) - {"full_attention", "sliding_attention"}:
        return whole, whole  # other kinds of layers have caches of their own
    # A sliding layer keeps the pass before, too: its window is a view.
    cached = length * len(description.full_layers) + (window + CHUNK) * description.layer_types.count(
        "sliding_attention"
    )
    pair = 2 * description.head_dim * itemsize  # a key and a value
    chunked = CHUNK * (activations + mask) + pair * (description.kv_heads * cached + description.query_heads * length)
    return whole, chunked
