"""Run `model.generate` with static steps: `custom_generate=bpc_calib.static_decoding`."""

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from bpc_calib.compat import generate_arguments, sampling_loop
from bpc_calib.errors import InputError
from bpc_calib.runtime.static_steps import check_static, static_steps

__all__ = ["static_decoding"]

KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict"}


def static_decoding(
    model: Any, input_ids: Tensor, *, stopping_criteria: Any, generation_config: Any, **arguments: Any
) -> Any:
    """Decode with `static_steps`: `model.generate(..., past_key_values=cache, custom_generate=static_decoding)`.

    The prefill and the decoding loop are those of transformers. So sampling, logits processors, stopping criteria,
    streamers and the returned value are the same as without static steps, and so are the tokens, except for the
    rounding of attention. The cache reserves room for `max_new_tokens` (or `max_length`).

    Raises:
        ModelError: static steps cannot serve the model (`static_steps`).
        InputError: the cache is not a `BPCCache`; or the call uses beams, drafts or `use_cache=False`, requests
            attentions or hidden states, or passes the model arguments other than the tokens.
    """
    mode = str(generation_config.get_generation_mode().value)
    if mode not in ("greedy_search", "sample"):
        raise InputError(f"static_decoding serves greedy decoding and sampling, not {mode.replace('_', ' ')}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise InputError(f"static_decoding returns no {name.removeprefix('output_').replace('_', ' ')}")
    if not arguments.get("use_cache", True):
        raise InputError("static_decoding needs use_cache=True")
    passed = generate_arguments()
    if passed.get("synced_gpus"):
        raise InputError("static_decoding does not serve synced_gpus")
    if "streamer" not in arguments:
        if "streamer" not in passed:
            raise InputError("static_decoding works only in model.generate(..., custom_generate=static_decoding)")
        arguments["streamer"] = passed["streamer"]
    cache = arguments.get("past_key_values")
    check_static(model, cache)
    with ExitStack() as stack:
        # The prefill predicts the first new token, and no step follows the last.
        stepping = _Stepping(model, generation_config.max_length - input_ids.shape[1] - 1, stack)
        return sampling_loop(model)(
            stepping,
            input_ids,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **arguments,
        )


class _Stepping:
    """Wrap the model for transformers' loop: each call runs one static step, every attribute is the model's own."""

    def __init__(self, model: Any, steps: int, stack: ExitStack) -> None:
        self.model, self.steps, self.stack = model, steps, stack
        self.step: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, **inputs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        ids, cache = inputs["input_ids"], inputs["past_key_values"]
        if self.step is None:
            passed = {name for name, value in inputs.items() if value is not None and value is not False}
            unknown = sorted(passed - KNOWN)
            if unknown:
                raise InputError(
                    f"static_decoding passes only tokens to the model, so it cannot serve {', '.join(unknown)}"
                )
            length, mask, positions = cache.get_seq_length(), inputs.get("attention_mask"), inputs.get("position_ids")
            block = static_steps(
                self.model,
                cache,
                self.steps,
                attention_mask=None if mask is None else mask[:, :length],
                position_ids=positions,
            )
            self.step = self.stack.enter_context(block)
        return CausalLMOutputWithPast(logits=self.step(ids).unsqueeze(1), past_key_values=cache)
