"""Switching a model to BPC's attention and back: `enable`, `disable`.

transformers calls the registered function in every layer. It finds the cache by an attribute of the keys that
`SparseLayer.update` returns, so nothing is shared by models, caches or threads. Whatever is not sparse goes to the
attention the model had, with the masks that are its own.
"""

import functools
import hashlib
import re
from typing import Any

from torch import Tensor

from bpc_calib.backends.dispatch import named
from bpc_calib.compat import attention_name, eager_attention
from bpc_calib.errors import InputError, ModelError
from bpc_calib.models.description import describe
from bpc_calib.models.observation import verify
from bpc_calib.runtime.attention_call import AttentionCall, layer_of

__all__ = ["disable", "enable", "is_enabled"]

PREFIX = "bpc_"


def enable(model: Any) -> None:
    """Let a transformers model serve a `BPCCache`; without one its attention stays bit for bit what it was.

    The model's own attention (SDPA, eager, FlashAttention, flex) keeps serving every step that is not
    sparse. Runs four tokens through the model to see that its layers can be served. Enabling twice is
    enabling once; `disable` undoes it.

    Args:
        model: a `PreTrainedModel` with a language-model head, or the part of it that holds the text model.

    Raises:
        ModelError: a model that BPC cannot serve; says why.
        InputError: `BPC_BACKEND` names no backend.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from bpc_calib.runtime.cache import check_layers

    part, base = _implementation(model)
    if _base(base) is not None:
        return
    named()
    description = describe(model.config)
    check_layers(model.config, description)
    masks = AttentionMaskInterface()
    if base not in masks:
        raise ModelError(f"{description.id}: its attention ({base}) registers no masks, so BPC cannot tell padding")
    verify(model, description)
    name = _name(base)
    AttentionInterface.register(name, functools.partial(_attention, base))
    AttentionMaskInterface.register(name, masks[base])
    model.set_attn_implementation({part: name})
    if _implementation(model)[1] != name:
        raise ModelError(f"{description.id} does not let its attention be set, so BPC cannot serve it")


def disable(model: Any) -> None:
    """Give the model its own attention back; nothing happens to a model that is not enabled."""
    part, name = _implementation(model)
    if (base := _base(name)) is not None:
        model.set_attn_implementation({part: base})


def is_enabled(model: Any) -> bool:
    """Whether `enable` was called for a model and not undone."""
    return _base(_implementation(model)[1]) is not None


def _implementation(model: Any) -> tuple[str, str]:
    """Where the text model's attention is set ("" is the model itself), and to what."""
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise InputError(f"expected a transformers model, not {type(model).__name__}")
    text = model.config.get_text_config(decoder=True)
    name = str(attention_name(text))
    if text is model.config:
        return "", name
    for part in model.config.sub_configs:
        if getattr(model.config, part, None) is text:
            return part, name
    raise ModelError(f"{type(model).__name__}: its text model cannot be set apart, so BPC cannot serve it")


def _name(base: str) -> str:
    """Ours for an attention of this name; transformers takes one with "flash" or "/" for a kernel to load."""
    plain = re.sub(r"\W", "_", base).replace("flash", "fa")
    return PREFIX + plain if plain == base else f"{PREFIX}{plain}_{hashlib.sha256(base.encode()).hexdigest()[:8]}"


def _base(name: str) -> str | None:
    """The attention below ours; None where the name is not ours."""
    from transformers import AttentionInterface

    function = AttentionInterface().get(name)
    if isinstance(function, functools.partial) and function.func is _attention:
        return str(function.args[0])
    return None


def _attention(
    base: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """Called by transformers: `[batch, heads, tokens, head_dim]` in, `[batch, tokens, heads, head_dim]` out."""
    layer = layer_of(key)
    if layer is not None:
        window, positions = arguments.get("sliding_window"), arguments.get("position_ids")
        call = AttentionCall(module, query, attention_mask, arguments.get("scaling"), window, positions)
        if (out := layer.attention(call)) is not None:
            return out, None
    return _own_attention(base, module)(_named(base, module), query, key, value, attention_mask, **arguments)


def _own_attention(base: str, module: Any) -> Any:
    from transformers import AttentionInterface

    if base != "eager":
        return AttentionInterface()[base]
    if (function := eager_attention(module)) is not None:
        return function
    raise ModelError(f"{type(module).__name__} has no eager attention")


def _named(base: str, module: Any) -> Any:
    """FlashAttention asks the module's config which implementation to load: it must not see our name."""
    return _Renamed(module, config=_Renamed(module.config, _attn_implementation=base)) if "flash" in base else module


class _Renamed:
    """An object but for some of its attributes."""

    def __init__(self, original: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)
