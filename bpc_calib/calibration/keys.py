"""The keys of one sample, and second moments of its queries, at some of its positions."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bpc_calib.compat import with_cache
from bpc_calib.errors import ModelError
from bpc_calib.method.metric import second_moment
from bpc_calib.models.description import ModelDescription
from bpc_calib.models.observation import input_device, observing
from bpc_calib.models.tensor_parallel import from_ranks

__all__ = ["CHUNK", "SampleKeys", "chunk_edges", "pass_bytes", "sample_keys"]

CHUNK = 2048  # tokens; the size decides the rounding, so it is part of the method


@dataclass(frozen=True)
class SampleKeys:
    """What is kept of one sample, by the index of the full-attention layer, on the CPU."""

    keys: dict[int, Tensor]  # [kv_heads, positions, head_dim], after RoPE, in the keys' own dtype
    moments: dict[int, Tensor]  # float64 [kv_heads, head_dim, head_dim]: `second_moment` of each group; may be empty


def sample_keys(
    model: Any,
    description: ModelDescription,
    tokens: Tensor,
    positions: list[int],
    *,
    offset: int = 0,
    moments: bool = False,
    passes: list[tuple[int, int]] | None = None,
) -> SampleKeys:
    """Run one sample through the model and keep its keys at some positions.

    A pass has one sample, because the batch size changes the bits of the keys. Processes with a shard of the model
    each call this together, and each returns the keys and moments of all heads.

    Args:
        tokens: `[T]`, any integer dtype, without padding.
        positions: ascending indices of the tokens whose keys to keep.
        offset: the position of the first token.
        moments: also sum `q^T q` over the queries at those positions.
        passes: the first and last + 1 token of each pass; None: `chunk_edges`.

    Raises:
        ModelError: the attention interface did not see a layer, or saw it twice; or a key is not finite.
    """
    keys: dict[int, list[Tensor]] = {layer: [] for layer in description.full_layers}
    summed: dict[int, Tensor] = {}
    wanted = torch.tensor(positions, dtype=torch.int64)
    start = end = 0  # of the current pass
    query_heads = description.query_heads  # of this process

    def keep(module: Any, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
        nonlocal query_heads
        if (layer := module.layer_idx) not in keys:
            return
        query_heads = query.shape[1]
        places = wanted[(wanted >= start) & (wanted < end)].to(key.device) - start
        # With a cache, the keys of earlier passes come first.
        keys[layer].append(key[0, :, start - end :].index_select(1, places).to("cpu"))
        if moments:
            queries = query[0].index_select(1, places).to("cpu").unflatten(0, (key.shape[1], -1))
            moment = second_moment(queries.flatten(1, 2))
            summed[layer] = summed[layer] + moment if layer in summed else moment

    from transformers import DynamicCache

    device = input_device(model)
    passes = passes or chunk_edges(model, description, len(tokens))
    cache = DynamicCache(config=model.config) if len(passes) > 1 else None
    with observing(model, keep), torch.inference_mode():
        for start, end in passes:
            model.base_model(
                input_ids=tokens[start:end].unsqueeze(0).to(device, torch.int64),
                position_ids=torch.arange(offset + start, offset + end, device=device).unsqueeze(0),
                **with_cache(cache),
                use_cache=cache is not None,
            )
    if any(len(parts) != len(passes) for parts in keys.values()):
        counts = {layer: len(parts) for layer, parts in keys.items()}
        raise ModelError(
            f"{description.id}: the attention interface saw the layers {counts} times, "
            f"expected {len(passes)} times each"
        )
    joined = {layer: torch.cat(parts, dim=1) for layer, parts in keys.items()}
    if query_heads < description.query_heads:  # each process saw its shard
        joined = {layer: copies[0] for layer, copies in from_ranks(joined, description, device).items()}
        summed = {layer: copies.sum(0) for layer, copies in from_ranks(summed, description, device).items()}
    for layer, each in joined.items():
        if not each.isfinite().all():
            raise ModelError(f"{description.id}: layer {layer}: keys hold NaN or infinity; try another dtype")
        if layer in summed and not summed[layer].isfinite().all():
            raise ModelError(f"{description.id}: layer {layer}: queries hold NaN or infinity; try another dtype")
    return SampleKeys(joined, summed)


def chunk_edges(model: Any, description: ModelDescription, length: int) -> list[tuple[int, int]]:
    """Return the first and last + 1 token of each pass over a sample of `length` tokens.

    It goes through the model at once, or in chunks with a cache, whichever needs clearly less memory. The choice is by
    count, not by the free memory: chunks change the last bits of the keys.
    """
    whole, chunked = pass_bytes(model.config.get_text_config(decoder=True), description, length, model.dtype.itemsize)
    if chunked > whole / 2:
        return [(0, length)]
    return list(pairwise([*range(0, length, CHUNK), length]))


def pass_bytes(text: Any, description: ModelDescription, length: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of a pass over a sample at once, and in chunks, without the weights.

    At once, it is that of one layer's activations, and for sliding windows a mask of `length` by `length`: a byte per
    pair, and its copy in the dtype of the scores. In chunks, the full-attention layers need a cache and every layer a
    mask of `CHUNK` by `length`.

    Args:
        text: the model's text config.
        description: the same model.
        length: tokens of the sample.
        itemsize: bytes of a number of the model's dtype.
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
