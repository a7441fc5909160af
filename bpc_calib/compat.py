"""Every use of another library's private parts, with the versions it was checked at.

Checked at transformers 5.17 (the oldest served) and 5.23.
"""

import functools
import inspect
import sys
from typing import Any

from packaging.version import Version

__all__ = [
    "attention_name",
    "can_set_attention",
    "continued_cache_restarts",
    "drafts_by_model",
    "eager_attention",
    "generate_arguments",
    "sampling_loop",
]


def attention_name(config: Any) -> str | None:
    """The attention implementation set in a config: `config._attn_implementation` is its only reader."""
    name = config._attn_implementation
    return None if name is None else str(name)


def can_set_attention(model_class: Any) -> bool:
    """Whether models of a class let their attention be set."""
    return bool(model_class._can_set_attn_implementation())


def eager_attention(module: Any) -> Any:
    """The eager attention of an attention module: every modelling file has its own. None where there is none."""
    for kind in type(module).__mro__:
        if function := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return function
    return None


def sampling_loop(model: Any) -> Any:
    """transformers' loop of greedy decoding and sampling, as a function of the model."""
    return type(model)._sample


def generate_arguments() -> dict[str, Any]:
    """The local variables of the `generate` that is running; empty where none is.

    transformers passes neither its streamer nor `synced_gpus` to a function given as `custom_generate`.
    """
    from transformers import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def drafts_by_model() -> bool:
    """Whether drafts come from a model, asked in a cache's `activate_past_recording`.

    transformers calls that method when a generation with drafts starts, and does not say what drafts. It stands in the
    local variables of the caller: an assistant model, or a generation config that names no prompt lookup.
    """
    caller = sys._getframe(2).f_locals
    settings = caller.get("generation_config")
    looks_up = getattr(settings, "prompt_lookup_num_tokens", None) is not None
    return caller.get("assistant_model") is not None or (settings is not None and not looks_up)


@functools.cache
def continued_cache_restarts() -> bool:
    """Whether `generate(prefill_chunk_size=...)` feeds a continued cache the whole text again: before 5.21 it does."""
    import transformers

    return Version(transformers.__version__) < Version("5.21")
