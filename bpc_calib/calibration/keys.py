"""The keys of one sample, and second moments of its queries: one forward pass, at some of its positions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bpc_calib.errors import ModelError
from bpc_calib.method.metric import second_moment
from bpc_calib.models.description import ModelDescription
from bpc_calib.models.observation import observing

__all__ = ["SampleKeys", "sample_keys"]


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
) -> SampleKeys:
    """Run one sample through the model and keep its keys at some positions.

    A pass has one sample, because the batch size changes the bits of the keys.

    Args:
        tokens: int64 `[T]`, without padding.
        positions: ascending indices of the tokens whose keys to keep.
        offset: the position of the first token.
        moments: also sum `q^T q` over the queries at those positions.

    Raises:
        ModelError: the attention interface did not see a layer, or saw it twice.
    """
    keys: dict[int, Tensor] = {}
    summed: dict[int, Tensor] = {}
    seen: list[int] = []
    wanted = torch.tensor(positions, dtype=torch.int64)

    def keep(module: Any, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
        if (layer := module.layer_idx) not in description.full_layers:
            return
        seen.append(layer)
        places = wanted.to(key.device)
        keys[layer] = key[0].index_select(1, places).to("cpu")
        if moments:
            queries = query[0].index_select(1, places).to("cpu").unflatten(0, (description.kv_heads, -1))
            summed[layer] = second_moment(queries.flatten(1, 2))

    device = model.device
    with observing(model, keep), torch.inference_mode():
        model.base_model(
            input_ids=tokens.unsqueeze(0).to(device),
            position_ids=torch.arange(offset, offset + len(tokens), device=device).unsqueeze(0),
            use_cache=False,
        )
    if sorted(seen) != description.full_layers:
        raise ModelError(
            f"{description.id}: the attention interface saw layers {sorted(seen)}, "
            f"expected each of {description.full_layers} once"
        )
    return SampleKeys(keys, summed)
