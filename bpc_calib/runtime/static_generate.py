"""transformers' `generate` with static steps: `static_generate`."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from bpc_calib.compat import cache_name, with_cache
from bpc_calib.errors import InputError
from bpc_calib.runtime.static_steps import check_static, static_steps

__all__ = ["static_generate"]

READ = {"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict"}
FEW = 20  # new tokens where nobody says how many: transformers' own default


def static_generate(model: Any, inputs: Tensor | None = None, *, cache: Any, **arguments: Any) -> Any:
    """Run `model.generate(inputs, cache=cache, **arguments)` with static steps after the prefill (`static_steps`).

    The loop is that of transformers. So sampling, logits processors, stopping criteria, streamers and the returned
    value are the same as without static steps, and so are the tokens, except for the rounding of attention.

    Args:
        model: an enabled model (`bpc_calib.enable`).
        inputs: the prompt, int64 `[B, N]`, as `generate` takes it; or pass `input_ids` or `inputs_embeds`.
        cache: a `BPCCache` of this model.
        arguments: others of `generate`. The cache reserves room for `max_new_tokens` (or `max_length`).

    Raises:
        ModelError: static steps cannot serve the model (`static_steps`).
        InputError: the cache is not a `BPCCache`; or the call uses beams, drafts, `use_cache=False` or `synced_gpus`,
            requests attentions or hidden states, or passes the model arguments other than the tokens.
    """
    settings = _settings(model, arguments)
    mode = str(settings.get_generation_mode(arguments.get("assistant_model")).value)
    if mode not in ("greedy_search", "sample"):
        raise InputError(f"static_generate serves greedy decoding and sampling, not {mode.replace('_', ' ')}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(settings, name, False):
            raise InputError(f"static_generate returns no {name.removeprefix('output_').replace('_', ' ')}")
    if settings.use_cache is False:
        raise InputError("static_generate needs use_cache=True")
    for name in ("synced_gpus", "custom_generate"):
        if arguments.get(name):
            raise InputError(f"static_generate does not serve {name}")
    check_static(model, cache)
    with ExitStack() as stack:
        call = _calls(model, cache, settings, stack)
        return _calling(model, call).generate(inputs, **with_cache(cache), **arguments)


def _settings(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the generation config that `generate` will work with: arguments, then a given config, then the model's."""
    settings, given = copy.deepcopy(model.generation_config), arguments.get("generation_config")
    for name, value in (({} if given is None else given.to_diff_dict()) | arguments).items():
        if hasattr(settings, name):
            setattr(settings, name, value)
    return settings


def _calling(model: Any, call: Callable[..., Any]) -> Any:
    """Return the same model, with the same weights, as an object whose calls run `call`."""
    kind = type(model)
    shadow = copy.copy(model)
    shadow.__class__ = type(kind.__name__, (kind,), {"__call__": lambda _, **inputs: call(**inputs)})
    return shadow


def _calls(model: Any, cache: Any, settings: Any, stack: ExitStack) -> Callable[..., Any]:
    """Return a function that runs the model, and static steps once a pass adds one token to a filled cache."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    step: Any = None
    left = 0  # steps of the current block

    def call(**inputs: Any) -> Any:
        nonlocal step, left
        ids, length = inputs.get("input_ids"), cache.get_seq_length()
        if step is None and (ids is None or ids.shape[1] != 1 or not length):
            return model(**inputs)
        passed = {name for name, value in inputs.items() if value is not None and value is not False}
        if unknown := sorted(passed - READ - {cache_name()}):
            raise InputError(f"static_generate passes the model only tokens, so it cannot serve {', '.join(unknown)}")
        if not left:
            stack.close()
            left = settings.max_new_tokens or max(FEW, (settings.max_length or 0) - length)
            mask = inputs.get("attention_mask")
            block = static_steps(
                model,
                cache,
                left,
                attention_mask=None if mask is None else mask[:, :length],
                position_ids=inputs.get("position_ids"),
            )
            step = stack.enter_context(block)
        left -= 1
        return CausalLMOutputWithPast(logits=step(ids).unsqueeze(1), **with_cache(cache))

    return call
