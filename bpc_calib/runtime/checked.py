"""Sparse steps, of which some are compared with full attention: how good is BPC on the text that runs?"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bpc_calib.compat import cache_name
from bpc_calib.errors import InputError
from bpc_calib.runtime.agreement import Agreement
from bpc_calib.runtime.own_loop import Chosen, run_loop, verified_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["checked_decoding"]


def checked_decoding(
    model: "PreTrainedModel",
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    every: int = 32,
    fallback: float = 0.0,
    on_check: Callable[[Agreement], None] | None = None,
    streamer: Any = None,
    **arguments: Any,
) -> Any:
    """Decode with BPC and measure: `model.generate(ids, cache=cache, custom_generate=checked_decoding, every=32)`.

    One step in `every` also runs with full attention, on the same cache; `cache.agreement` counts how often both choose
    the same token, and how far the distributions of the next token are apart. Without a fallback the text is that of
    the `BPCCache` without checks. Streaming works as with `exact_decoding`.

    Args:
        model: an enabled model (`bpc_calib.enable`).
        input_ids, logits_processor, stopping_criteria, generation_config, arguments: from `generate`.
        every: steps of which one is checked.
        fallback: the share of the last 64 checks that must agree: once fewer do, the rest of the text is decoded with
            full attention.
        on_check: is called with `cache.agreement` after each check.
        streamer: receives each token.

    Returns:
        What `generate` returns for greedy decoding and sampling.

    Raises:
        InputError: as for `exact_decoding`.
    """
    if every < 1:
        raise InputError(f"every must be 1 or more steps, not {every}")
    cache = verified_cache(model, arguments.get(cache_name()), fallback)
    chosen, agreement, steps = Chosen(model, input_ids, logits_processor, generation_config), cache.agreement, 0
    fell_back = False

    def check(inputs: dict[str, Any]) -> Tensor:
        """Return the logits `[B, vocab]` of full attention for the next token, and leave the cache as it was."""
        with cache.without_trace(), cache.full_attention():
            logits: Tensor = model(**inputs).logits[:, -1]
        return logits

    def call(**inputs: Any) -> Any:
        nonlocal steps, fell_back
        ids = inputs.get("input_ids")
        if not chosen.begun or ids is None or ids.shape[1] != 1:  # the prompt
            return model(**inputs)
        steps += 1
        full = None if fell_back or steps % every else check(inputs)
        with cache.full_attention(fell_back):
            out = model(**inputs)
        if full is None:
            return out
        sparse = out.logits[:, -1]
        with chosen.without_trace():
            theirs = chosen.guess(chosen.text, full)
        with chosen.without_trace():
            ours = chosen.guess(chosen.text, sparse)
        live = ~chosen.ended.to(full.device)
        agreement.add((ours == theirs).squeeze(1)[live], sparse[live], full[live])
        if agreement.is_below(fallback):
            fell_back, agreement.fell_back = True, cache.get_seq_length()
        if on_check is not None:
            on_check(agreement)
        return out

    return run_loop(model, call, chosen, stopping_criteria, streamer, arguments)
