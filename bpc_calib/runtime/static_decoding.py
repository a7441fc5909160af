"""`model.generate` by static steps: `custom_generate=bpc_calib.static_decoding`."""

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
    """Decode by `static_steps`: `model.generate(..., past_key_values=cache, custom_generate=static_decoding)`.

    The prefill is an ordinary one, and the loop is that of transformers: sampling, processors of logits, stopping
    criteria, streamers and what is returned are as without it, and so are the tokens, up to how attention is rounded.
    Room is made for `max_new_tokens` (or `max_length`).

    Raises:
        ModelError: a model that static steps cannot serve (`static_steps`).
        InputError: no `BPCCache`, beams, drafts, `use_cache=False`, attentions or hidden states to return, or
            arguments for the model beside the tokens.
    """
    mode = str(generation_config.get_generation_mode().value)
    if mode not in ("greedy_search", "sample"):
        raise InputError(f"static_decoding serves greedy decoding and sampling, not {mode.replace('_', ' ')}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise InputError(f"static_decoding returns no {name.removeprefix('output_').replace('_', ' ')}")
    if not arguments.get("use_cache", True):
        raise InputError("static_decoding needs use_cache=True")
    given = generate_arguments()
    if given.get("synced_gpus"):
        raise InputError("static_decoding does not serve synced_gpus")
    if "streamer" not in arguments:
        if "streamer" not in given:
            raise InputError("static_decoding is for model.generate(..., custom_generate=static_decoding)")
        arguments["streamer"] = given["streamer"]
    cache = arguments.get("past_key_values")
    check_static(model, cache)
    with ExitStack() as stack:
        # The last token needs no step behind it; the first is of the prefill.
        stepping = _Stepping(model, generation_config.max_length - input_ids.shape[1] - 1, stack)
        return sampling_loop(model)(
            stepping,
            input_ids,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **arguments,
        )


class _Stepping:
    """The model as transformers' loop sees it: all its own, but called once a step it is `static_steps`."""

    def __init__(self, model: Any, steps: int, stack: ExitStack) -> None:
        self.model, self.steps, self.stack = model, steps, stack
        self.step: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, **inputs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        ids, cache = inputs["input_ids"], inputs["past_key_values"]
        if self.step is None:
            given = {name for name, value in inputs.items() if value is not None and value is not False}
            beside = sorted(given - KNOWN)
            if beside:
                raise InputError(
                    f"static_decoding gives the model nothing beside its tokens, and {', '.join(beside)} came"
                )
            length, mask, positions = cache.get_seq_length(), inputs.get("attention_mask"), inputs.get("position_ids")
            begun = static_steps(
                self.model,
                cache,
                self.steps,
                attention_mask=None if mask is None else mask[:, :length],
                position_ids=positions,
            )
            self.step = self.stack.enter_context(begun)
        return CausalLMOutputWithPast(logits=self.step(ids).unsqueeze(1), past_key_values=cache)
