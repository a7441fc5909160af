"""Full attention's own text at nearly the speed of sparse steps: they draft, and passes of full attention verify.

This is speculative decoding (Leviathan, Kalman, Matias 2023, arXiv:2211.17192) with the model as its own draft, as in
TriForce (arXiv:2404.11912) and MagicDec (arXiv:2408.11049), but with another rule of acceptance. transformers' own loop
chooses every token, from full attention's logits and with its own random numbers. A drafted token is right if the loop
then chooses the same. Drafts are chosen with the random numbers that the loop will use, so they mostly are. The text is
therefore that of full attention with the same seed, whatever is drafted.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bpc_calib.compat import cache_name, with_cache
from bpc_calib.errors import InputError
from bpc_calib.method.defaults import MOST_DRAFTED
from bpc_calib.models.description import describe
from bpc_calib.runtime.agreement import Agreement
from bpc_calib.runtime.draft_length import Pace
from bpc_calib.runtime.own_loop import Chosen, check_tokens, run_loop, verified_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["exact_decoding"]

FIXED = 4  # drafted tokens where several processes must draft as many


def exact_decoding(
    model: "PreTrainedModel",
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    draft: int | None = None,
    fallback: float = 0.0,
    on_check: Callable[[Agreement], None] | None = None,
    streamer: Any = None,
    **arguments: Any,
) -> Any:
    """Decode full attention's text, faster: `model.generate(ids, cache=cache, custom_generate=exact_decoding)`.

    The `BPCCache` decides how tokens are drafted; `cache.agreement` says how often drafts were right. Afterwards the
    cache holds what full attention would have cached. The tokens are full attention's, but where two
    have nearly equal logits: a pass over several tokens rounds differently from a pass over one, which shows now and
    then in 16 bits, and hardly ever in float32. A batch accepts as many tokens as the sequence that accepts least.

    `generate` gives its streamer the prompt alone: pass the same to both, `generate(..., streamer=streamer,
    custom_generate=functools.partial(exact_decoding, streamer=streamer))`.

    Args:
        model: an enabled model (`bpc_calib.enable`).
        input_ids, logits_processor, stopping_criteria, generation_config, arguments: from `generate`.
        draft: tokens to draft at once; None: as many as make the measured speed largest, and none where drafts do not
            pay. With a number, equal runs round in the same way.
        fallback: the share of the last 64 drafted tokens that must be right: once fewer are, the rest of the text is
            decoded without drafts.
        on_check: is called with `cache.agreement` after each check of a drafted token.
        streamer: receives each token when it is accepted.

    Returns:
        What `generate` returns for greedy decoding and sampling.

    Raises:
        InputError: an argument is out of range, the cache is not a `BPCCache`, the model is not enabled, or the call
            uses beams, requests attentions or hidden states, or passes the model more than tokens.
    """
    if draft is not None and not 1 <= draft <= MOST_DRAFTED:
        raise InputError(f"draft must be from 1 to {MOST_DRAFTED} tokens, not {draft}")
    cache = verified_cache(model, arguments.get(cache_name()), fallback)
    if draft is None and describe(model.config).ranks > 1:
        draft = FIXED
    chosen = Chosen(model, input_ids, logits_processor, generation_config)
    run = _Exact(model, cache, chosen, draft, fallback, on_check)
    try:
        return run_loop(model, run, chosen, stopping_criteria, streamer, arguments)
    finally:  # forget what the loop did not feed; after an error too, where layers may hold more tokens than others
        cache.back(run.length)


class _Exact:
    """The calls of the model that one loop makes: each returns full attention's logits for the next token."""

    def __init__(
        self,
        model: Any,
        cache: Any,
        chosen: Chosen,
        draft: int | None,
        fallback: float,
        on_check: Callable[[Agreement], None] | None,
    ) -> None:
        self.model, self.cache, self.chosen = model, cache, chosen
        self.draft, self.fallback, self.on_check = draft, fallback, on_check
        self.pace, self.plain = Pace(), False
        self.length = cache.get_seq_length()  # tokens that the loop has fed
        self.drafted = torch.empty(0, 0, dtype=torch.int64)  # [B, n] of the last round
        self.guessed: list[Tensor] = []  # [B, vocab] each: the logits that chose them
        self.logits: Tensor | None = None  # [B, n + 1, vocab] of full attention, for the fed token and the drafted ones
        self.given = 0  # of these logits, how many the loop got

    def __call__(self, **inputs: Any) -> Any:
        """Stand in for a call of the model."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        ids = inputs.get("input_ids")
        if not self.chosen.begun or ids is None or ids.shape[1] != 1:  # the prompt, maybe in chunks
            with self.cache.full_attention(ids is not None and ids.shape[1] == 1):
                out = self.model(**inputs)
            self.length = self.cache.get_seq_length()
            return out
        check_tokens(inputs, "exact decoding")
        logits = self._ahead(ids)
        if logits is None:
            logits = self._round(ids, inputs.get("attention_mask"), inputs.get("position_ids"))
        self.length += 1
        self.cache.agreement.add_ties(logits[~self.chosen.ended.to(logits.device)])
        return CausalLMOutputWithPast(logits=logits.unsqueeze(1), **with_cache(self.cache))

    def _ahead(self, ids: Tensor) -> Tensor | None:
        """Return the logits after these tokens `[B, 1]` if they were drafted, else None."""
        place = self.given - 1
        if self.logits is None or place == self.drafted.shape[1]:
            return None
        right = (self.drafted[:, place : place + 1] == ids).squeeze(1)
        live = ~self.chosen.ended.to(right.device)
        agreement, right = self.cache.agreement, right[live]
        agreement.add(right, self.guessed[place][live], self.logits[live, place])
        every = bool(right.all())
        self.pace.saw_token(every)
        if not self.plain and agreement.is_below(self.fallback):
            self.plain, agreement.fell_back = True, self.length
        if self.on_check is not None:
            self.on_check(agreement)
        if not every:
            return None
        self.given += 1
        return self.logits[:, self.given - 1]

    def _round(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Feed tokens `[B, 1]`, and tokens drafted behind them; return full attention's logits after the former."""
        self.logits = None
        self.cache.back(self.length)
        began = self._now()
        with self.cache.without_trace():
            self._draft(ids, self._count(), mask, positions)
        count, drafted = self.drafted.shape[1], self._now()
        self.cache.record()
        with self.cache.full_attention():
            self.logits = self._forward(torch.cat([ids, self.drafted], 1) if count else ids, 0, mask, positions)
        if self.draft is None:
            self.pace.saw(count, drafted - began, self._now() - drafted)
        self.given = 1
        return self.logits[:, 0]

    def _count(self) -> int:
        """Return how many tokens to draft: none where steps attend to everything anyway."""
        left = self.chosen.left - 1  # the round gives one token more
        if self.plain or left < 1 or self.length + 1 < self.cache.min_context:
            return 0
        return self.pace.choose(left) if self.draft is None else min(self.draft, left)

    def _draft(self, ids: Tensor, count: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """Draft at most `count` tokens behind `ids [B, 1]` with sparse steps."""
        text, drafted = self.chosen.text, [ids[:, :0]]
        self.guessed = []
        with self.chosen.without_trace():
            for place in range(count):
                logits = self._forward(ids, place, mask, positions)[:, -1]
                ids = self.chosen.guess(text, logits)
                text = torch.cat([text, ids.to(text.device)], 1)
                drafted.append(ids)
                self.guessed.append(logits)
        self.drafted = torch.cat(drafted, 1)

    def _forward(self, ids: Tensor, place: int, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Return the logits `[B, n, vocab]` of tokens `[B, n]`; the mask and positions are those of place 0."""
        new = ids.shape[1]
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, place + new - 1), value=1)
        if positions is not None:
            positions = positions + torch.arange(place, place + new, device=positions.device)
        out = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, **with_cache(self.cache), use_cache=True
        )
        logits: Tensor = out.logits
        return logits

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()
