"""Every use of another library's private parts. Checked with transformers 5.17 (the oldest supported) and 5.23."""

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
    """Return the attention implementation of a config: only the private `config._attn_implementation` has it."""
    name = config._attn_implementation
    return None if name is None else str(name)


def can_set_attention(model_class: Any) -> bool:
    """Return True if the attention implementation of models of this class can be changed."""
    return bool(model_class._can_set_attn_implementation())


def eager_attention(module: Any) -> Any:
    """Return the eager attention function of an attention module's modelling file, or None if the file has none."""
    for kind in type(module).__mro__:
        if function := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return function
    return None


def sampling_loop(model: Any) -> Any:
    """Return transformers' loop of greedy decoding and sampling, as a function with the model as first argument."""
    return type(model)._sample


def generate_arguments() -> dict[str, Any]:
    """Return the local variables of the `generate` call on the stack, or an empty dict if there is none.

    transformers passes neither its streamer nor `synced_gpus` to the `custom_generate` function.
    """
    from transformers import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def drafts_by_model() -> bool:
    """Return True if a model makes the drafts. Call it only in a cache's `activate_past_recording`.

    transformers calls that method at the start of a generation with drafts, but does not pass the source of the drafts.
    The local variables of the caller show it: an assistant model, or a generation config without prompt lookup.
    """
    caller = sys._getframe(2).f_locals
    settings = caller.get("generation_config")
    looks_up = getattr(settings, "prompt_lookup_num_tokens", None) is not None
    return caller.get("assistant_model") is not None or (settings is not None and not looks_up)


@functools.cache
def continued_cache_restarts() -> bool:
    """Return True if `generate(prefill_chunk_size=...)` passes a continued cache the whole text again (before 5.21)."""
    import transformers

    return Version(transformers.__version__) < Version("5.21")
