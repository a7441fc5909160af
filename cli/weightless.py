"""A model without its weights, to count what it takes."""

from typing import Any

from bpc_cli.opening import Dtype, OpenedModel

__all__ = ["model_without_weights", "weight_bytes"]


def model_without_weights(opened: OpenedModel) -> Any:
    """The model without memory for its weights, in the data type that it would be loaded in."""
    import torch
    from transformers import AutoModelForCausalLM

    chosen, config = opened.options.dtype, opened.config
    own = getattr(config, "dtype", None) or torch.float32
    dtype = own if chosen is Dtype.auto else getattr(torch, chosen.value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=opened.options.trust_remote_code)


def weight_bytes(model: Any) -> int:
    """The bytes of all weights."""
    return sum(each.numel() * each.dtype.itemsize for each in model.parameters())
