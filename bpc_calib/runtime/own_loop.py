"""transformers' own decoding loop around other calls of the model: whoever makes the calls decides how logits come."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bpc_calib.compat import cache_name, sampling_loop
from bpc_calib.errors import InputError
from bpc_calib.runtime.enabling import is_enabled
from bpc_calib.runtime.served_layers import check_undoable

__all__ = ["Chosen", "calling", "check_loop", "check_tokens", "run_loop", "verified_cache"]

READ = {"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict"}


def calling(model: Any, call: Callable[..., Any]) -> Any:
    """Return the same model, with the same weights, as an object whose calls run `call`."""
    kind = type(model)
    shadow = copy.copy(model)
    shadow.__class__ = type(kind.__name__, (kind,), {"__call__": lambda _, **inputs: call(**inputs)})
    return shadow


def check_tokens(inputs: dict[str, Any], caller: str) -> None:
    """Raise `InputError` where the loop passes the model more than tokens."""
    passed = {name for name, value in inputs.items() if value is not None and value is not False}
    if unknown := sorted(passed - READ - {cache_name()}):
        raise InputError(f"{caller} passes the model only tokens, so it cannot serve {', '.join(unknown)}")


def check_loop(settings: Any, assistant: Any, serves: str, returns: str) -> None:
    """Raise `InputError` unless these settings ask for greedy decoding or sampling, and for tokens alone.

    Args:
        settings: the generation config.
        assistant: the assistant model, or None.
        serves, returns: how the two messages begin.
    """
    mode = str(settings.get_generation_mode(assistant).value)
    if mode not in ("greedy_search", "sample"):
        raise InputError(f"{serves} greedy decoding and sampling, not {mode.replace('_', ' ')}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(settings, name, False):
            raise InputError(f"{returns} no {name.removeprefix('output_').replace('_', ' ')}")


class Chosen:
    """What a loop has chosen so far, and how it chooses: by its processors and its generation config."""

    def __init__(self, model: Any, prompt: Tensor, processors: Any, settings: Any) -> None:
        self.processors, self.settings = processors, settings
        try:  # one may keep a state, which guesses may not change; and the model, which is not copied
            self.guessing = copy.deepcopy(processors, {id(model): model})
        except TypeError as fault:
            raise InputError(
                f"exact and checked decoding copy the logits processors, and one cannot be copied ({fault})"
            ) from fault
        self.devices = [model.device] if model.device.type == "cuda" else []
        self.text = prompt  # int64 [B, tokens], and what was chosen
        self.begun = False  # whether a token was chosen
        self.ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)  # sequences that have ended

    @property
    def left(self) -> int:
        """Tokens that the loop may still choose."""
        return int(self.settings.max_length) - self.text.shape[1]

    def guess(self, text: Tensor, logits: Tensor) -> Tensor:
        """Return the tokens `[B, 1]` that the loop would choose next, with its next random numbers.

        Args:
            text: int64 `[B, tokens]` before them.
            logits: `[B, vocab]`.
        """
        scores = self.guessing(text, logits.to(text.device, torch.float32, copy=True))
        if not self.settings.do_sample:
            return scores.argmax(-1, keepdim=True)
        return torch.multinomial(scores.softmax(-1), 1)

    def without_trace(self) -> Any:
        """Inside this block, random numbers are the loop's next ones; afterwards the loop gets the same."""
        return torch.random.fork_rng(self.devices)


def verified_cache(model: Any, cache: Any, fallback: float) -> Any:
    """Return the cache of a call whose tokens are verified, after a check.

    Raises:
        InputError: the cache is not a `BPCCache`, the model is not enabled, or the share is out of range.
        ModelError: a layer keeps one state of all tokens.
    """
    from bpc_calib.runtime.cache import BPCCache

    if not isinstance(cache, BPCCache):
        raise InputError(f"exact and checked decoding need {cache_name()}=BPCCache(...), not {type(cache).__name__}")
    if not is_enabled(model):
        raise InputError("call bpc_calib.enable(model) before exact or checked decoding")
    if not 0 <= fallback <= 1:
        raise InputError(f"fallback must be a share from 0 to 1, not {fallback}")
    check_undoable(cache.layers, "exact and checked decoding could not undo what they try")
    return cache


def run_loop(
    model: Any, call: Callable[..., Any], chosen: Chosen, criteria: Any, streamer: Any, arguments: dict[str, Any]
) -> Any:
    """Run the loop of greedy decoding and sampling, which calls `call` as the model; `chosen` follows it.

    Raises:
        InputError: the settings ask for another loop, or for what a pass over several tokens does not return.
    """
    check_loop(chosen.settings, None, "exact and checked decoding serve", "exact and checked decoding return")

    class Followed(type(criteria)):  # type: ignore[misc]
        def __call__(self, text: Tensor, scores: Any, **more: Any) -> Any:
            ended = super().__call__(text, scores, **more)
            chosen.text, chosen.begun, chosen.ended = text, True, chosen.ended | ended
            return ended

    return sampling_loop(model)(
        calling(model, call),
        chosen.text,
        logits_processor=chosen.processors,
        stopping_criteria=Followed(criteria),
        generation_config=chosen.settings,
        streamer=streamer,
        **arguments,
    )
