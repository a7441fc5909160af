"""Switch a model to BPC's attention and back: `enable`, `disable`.

transformers calls the registered function in every layer. The function finds the cache layer through an attribute of
the keys that the layer's `update` returns, so models, caches and threads share no state. Every call that is not sparse
goes to the model's own attention with its own masks, except one-token steps on a CPU: those of dense layers
(`DenseLayer`), and of all where BPC's kernel is faster (`own_from`).
"""

import functools
import hashlib
import re
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bpc_calib.backends.dispatch import named
from bpc_calib.compat import attention_name, eager_attention
from bpc_calib.errors import InputError, ModelError
from bpc_calib.models.description import describe
from bpc_calib.models.observation import verify
from bpc_calib.runtime.call import AttentionCall, layer_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["disable", "enable", "is_enabled"]

PREFIX = "bpc_"


def enable(model: "PreTrainedModel") -> None:
    """Prepare a transformers model to decode with a `BPCCache`; with any other cache its results stay the same bits.

    The model's own attention (SDPA, eager, FlashAttention, flex) still computes every step that is not sparse, except
    one-token steps of a `BPCCache` on a CPU: those of dense layers, and in 16 bits those of all layers where the
    processor has no products of such numbers.
    `enable` runs four tokens through the model to check that BPC can serve its layers. A second call does nothing;
    `disable` undoes the first.

    Args:
        model: a `PreTrainedModel` with a language-model head, or the part of it that holds the text model.

    Raises:
        ModelError: BPC cannot serve the model; the message says why.
        InputError: the environment variable `BPC_BACKEND` does not name a backend.
    """
    from transformers import AttentionMaskInterface

    from bpc_calib.runtime.served_layers import check_layers

    part, base = _implementation(model)
    if (own := _base(base)) is not None:
        _register(own)  # another process may have enabled it
        return
    named()
    description = describe(model.config)
    check_layers(model.config, description)
    masks = AttentionMaskInterface()
    if base not in masks:
        raise ModelError(
            f"{description.id}: its attention ({base}) registers no mask function, so BPC cannot recognize padding"
        )
    verify(model, description)
    name = _register(base)
    model.set_attn_implementation({part: name})
    if _implementation(model)[1] != name:
        raise ModelError(f"{description.id} ignores set_attn_implementation, so BPC cannot serve it")


def _register(base: str) -> str:
    """Tell transformers of BPC's form of this attention; return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = _name(base)
    AttentionInterface.register(name, functools.partial(_attention, base))
    AttentionMaskInterface.register(name, AttentionMaskInterface()[base])
    return name


def disable(model: "PreTrainedModel") -> None:
    """Restore the model's own attention; do nothing if the model is not enabled."""
    part, name = _implementation(model)
    if (base := _base(name)) is not None:
        model.set_attn_implementation({part: base})


def is_enabled(model: Any) -> bool:
    """Return whether the model is enabled."""
    return _base(_implementation(model)[1]) is not None


def _implementation(model: Any) -> tuple[str, str]:
    """Return the sub-config that sets the text model's attention ("": the model's own config), and its name there."""
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise InputError(f"expected a transformers model, not {type(model).__name__}")
    text = model.config.get_text_config(decoder=True)
    name = str(attention_name(text))
    if text is model.config:
        return "", name
    for part in model.config.sub_configs:
        if getattr(model.config, part, None) is text:
            return part, name
    raise ModelError(f"{type(model).__name__}: no sub-config holds its text model, so BPC cannot serve it")


def _name(base: str) -> str:
    """Return BPC's name for this attention; transformers would load a kernel for a name with "flash" or "/"."""
    plain = re.sub(r"\W", "_", base).replace("flash", "fa")
    return PREFIX + plain if plain == base else f"{PREFIX}{plain}_{hashlib.sha256(base.encode()).hexdigest()[:8]}"


def _base(name: str) -> str | None:
    """Return the model's own attention under BPC's name; None if the name is not one of BPC's."""
    from transformers import AttentionInterface

    if not name.startswith(PREFIX):
        return None
    known = (base for base in ("eager", *AttentionInterface()) if not base.startswith(PREFIX))
    return next((base for base in known if _name(base) == name), None)


def _attention(
    base: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for transformers: `[batch, heads, tokens, head_dim]` to `[batch, tokens, heads, head_dim]`."""
    layer = layer_of(key)
    if layer is not None:
        window, positions = arguments.get("sliding_window"), arguments.get("position_ids")
        call = AttentionCall(module, query, attention_mask, arguments.get("scaling"), window, positions)
        if (out := layer.attention(call)) is not None:
            return out, None
        key, value = layer.whole(key, value)
    return _own_attention(base, module)(_named(base, module), query, key, value, attention_mask, **arguments)


def _own_attention(base: str, module: Any) -> Any:
    from transformers import AttentionInterface

    if base != "eager":
        return AttentionInterface()[base]
    if (function := eager_attention(module)) is not None:
        return function
    raise ModelError(f"{type(module).__name__} has no eager attention")


def _named(base: str, module: Any) -> Any:
    """Hide BPC's name from FlashAttention, which reads in the module's config which implementation to load."""
    return _Renamed(module, config=_Renamed(module.config, _attn_implementation=base)) if "flash" in base else module


class _Renamed:
    """An object with a few attributes replaced."""

    def __init__(self, original: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)
