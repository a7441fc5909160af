"""Where a model takes its input, which `model.device` does not say of a model spread over devices."""

from typing import Any

import torch

__all__ = ["has_no_weights", "input_device"]


def input_device(model: Any) -> torch.device:
    """Return the device for the token ids: where the embedding computes, even if its weights are offloaded."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)  # accelerate's, with `device_map`
    for each in (hook, *getattr(hook, "hooks", ())):
        if (device := getattr(each, "execution_device", None)) is not None:
            return torch.device(device)
    device = embedding.weight.device
    return device if device.type != "meta" else torch.device("cpu")


def has_no_weights(model: Any) -> bool:
    """Return True for a model on the device "meta", where accelerate's hooks will not load offloaded weights either."""
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not hooked and all(weight.is_meta for weight in model.parameters())
