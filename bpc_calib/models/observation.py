"""Observe the queries and keys of a model's attention: after RoPE, before the dot product."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from bpc_calib.compat import attention_name
from bpc_calib.errors import ModelError
from bpc_calib.models.description import ModelDescription, heads_per_rank
from bpc_calib.models.tensor_parallel import check_shards

__all__ = ["input_device", "observing", "verify"]

NAME = "bpc_observe"

# Arguments: module, query [batch, query_heads, T, D], key and value [batch, kv_heads, T, D], the other arguments.
# Returns attention [batch, T, query_heads, D] to go on with; None: that of the model.
Observer = Callable[[Any, Tensor, Tensor, Tensor, dict[str, Any]], Tensor | None]

_observer: ContextVar[Observer | None] = ContextVar("bpc_observer", default=None)


def _observed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    observer = _observer.get()
    if observer is not None and (own := observer(module, query, key, value, arguments)) is not None:
        return own, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)


@contextmanager
def observing(model: Any, observer: Observer) -> Iterator[None]:
    """Call `observer` in every attention layer of every forward pass inside the `with` block.

    The passes use SDPA, evaluation mode and no autocast. At the end, the model has its previous attention and
    mode again.

    Raises:
        ModelError: the model does not use transformers' attention interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _observed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    parts = model.config.sub_configs
    before = {"": attention_name(model.config)} | {
        part: name
        for part in parts
        if (sub := getattr(model.config, part, None)) is not None and (name := attention_name(sub)) is not None
    }
    training = [module for module in model.modules() if module.training]
    token = _observer.set(observer)
    try:
        model.set_attn_implementation(NAME)
        if attention_name(model.config.get_text_config(decoder=True)) != NAME:
            raise ModelError(
                f"{type(model).__name__} does not use transformers' attention interface, so BPC does not support it"
            )
        model.eval()
        with torch.autocast(input_device(model).type, enabled=False):
            yield
    finally:
        _observer.reset(token)
        model.set_attn_implementation(before)
        for module in training:
            module.training = True


def verify(model: Any, description: ModelDescription) -> None:
    """Run a few tokens through the model and check that its attention matches the description.

    A model without memory for its weights (on the device "meta") runs too, unless a layer needs values, such as those
    that choose experts: then torch raises an error of its own.

    Raises:
        ModelError: a layer bypasses the attention interface, is not causal, caps its logits, has
            attention sinks, or has other shapes than the description.
    """
    seen: list[int] = []
    query_heads, kv_heads, ranks = description.query_heads, description.kv_heads, description.ranks
    expected = [(query_heads, kv_heads, description.head_dim)]
    if ranks > 1 and (held := heads_per_rank(kv_heads, ranks)) is not None:  # or a process's shard
        expected.append((query_heads // ranks, held, description.head_dim))
    check_shards(model, description)

    def check(module: Any, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
        layer = getattr(module, "layer_idx", None)
        if layer not in description.full_layers:
            return
        fault = None
        heads = (query.shape[1], key.shape[1], key.shape[3])
        window = arguments.get("sliding_window")
        if arguments.get("is_causal", getattr(module, "is_causal", True)) is False:
            fault = "attends in both directions, so this is not a causal language model"
        elif arguments.get("softcap") is not None:
            fault = "caps its attention logits (soft-capping), which BPC does not support"
        elif arguments.get("s_aux") is not None:
            fault = "has attention sinks, which BPC does not support"
        elif window and description.context_limit and window < description.context_limit:
            fault = f"has a sliding window of {window}, which its config does not mention"
        elif heads not in expected or value.shape[1:] != key.shape[1:]:
            fault = (
                f"has (query heads, KV heads, head_dim) {heads} and values {list(value.shape[1:])}, "
                f"but its config says {' or '.join(map(str, expected))}"
            )
        if fault:
            raise ModelError(f"{description.id} ({description.model_type}): layer {layer} {fault}")
        seen.append(layer)

    # On the device "meta", where accelerate's hooks will not load offloaded weights either.
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    weightless = not hooked and all(weight.is_meta for weight in model.parameters())
    device = torch.device("meta") if weightless else input_device(model)
    ids = torch.arange(4, device=device).unsqueeze(0) % description.vocab_size
    # Without a mask, transformers looks at the values of the positions, which "meta" does not have.
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=device) if weightless else None
    with observing(model, check), torch.inference_mode():
        model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    if sorted(seen) != description.full_layers:
        missing = sorted(set(description.full_layers) - set(seen))
        fault = "bypass transformers' attention interface" if missing else "attend more than once"
        layers = missing or sorted({layer for layer in seen if seen.count(layer) > 1})
        raise ModelError(
            f"{description.id} ({description.model_type}): layers {layers} {fault}, so BPC does not support it"
        )


def input_device(model: Any) -> torch.device:
    """Return the device for the token ids: where the embedding computes, even if its weights are offloaded."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)  # accelerate's, with `device_map`
    for each in (hook, *getattr(hook, "hooks", ())):
        if (device := getattr(each, "execution_device", None)) is not None:
            return torch.device(device)
    device = embedding.weight.device
    return device if device.type != "meta" else torch.device("cpu")
