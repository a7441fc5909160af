"""A model for lm_eval whose answers are decoded by a cache under comparison.

The context without its last token is prefilled densely. The last token and every token of the answer are decoding
steps, both for generated answers and for answers whose likelihood is measured.
"""

from collections.abc import Callable
from typing import Any

import torch

from bpc_calib.errors import InputError
from bpc_calib.evaluation.forcing import force, fork, log_likelihoods, prefill
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache

__all__ = ["harness_model"]

NEW_TOKENS = 256  # if a task sets no limit


def harness_model(model: Any, tokenizer: Any, empty: Callable[[], BPCCache]) -> Any:
    """Return an lm_eval model that runs an enabled `model` (`bpc_calib.enable`) with caches from `empty()`."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    limit = describe(model.config).context_limit or 1 << 30

    def begin(context: list[int]) -> tuple[BPCCache, list[int]]:
        """Return a cache with the context except its last token, and the last token."""
        cache = empty()
        if len(context) > 1:
            fork(prefill(model, torch.tensor([context[:-1]], device=model.device)), cache)
        return cache, context[-1:]

    class Decoding(TemplateLM):  # type: ignore[misc]
        eot_token_id = tokenizer.eos_token_id
        tokenizer_name = str(tokenizer.name_or_path).replace("/", "__")
        prefix_token_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None:
                add_special_tokens = not (tokenizer.bos_token and string.startswith(tokenizer.bos_token))
            return list(tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

        def chat_template(self, chat_template: bool | str = False) -> str:
            return str(tokenizer.chat_template) if chat_template else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            from jinja2 import TemplateError

            def write(messages: list[dict[str, str]]) -> str:
                more = {"add_generation_prompt": add_generation_prompt}
                more["continue_final_message"] = not add_generation_prompt
                return str(tokenizer.apply_chat_template(messages, tokenize=False, **more))

            try:
                return write(chat_history)
            except TemplateError:  # some templates know no system message; lm_eval leaves it out, too
                return write([message for message in chat_history if message["role"] != "system"])

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            answers = []
            for _, context, continuation in requests:
                if not continuation:
                    answers.append((0.0, True))
                    continue
                context = context[-max(1, limit - len(continuation)) :]
                cache, last = begin(context)
                ids = torch.tensor([last + continuation], device=model.device)
                likely, greedy = log_likelihoods(model, cache, ids)
                answers.append((float(likely.double().sum()), bool(greedy.all())))
            return answers

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            answers = []
            for (text,) in [request.args for request in requests]:
                tokens = self.tok_encode(text, add_special_tokens=False)
                windows = get_rolling_token_windows(tokens, self.prefix_token_id, limit, 1)
                parts = [(None, *make_disjoint_window(window)) for window in windows]
                answers.append(sum(likely for likely, _ in self._loglikelihood_tokens(parts)))
            return answers

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _generate(self, text: str, settings: dict[str, Any]) -> str:
            if settings.get("do_sample") and settings.get("temperature", 1.0):
                raise InputError("this task samples its answers, but bpc eval decodes only greedily")
            until = settings.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            new = int(settings.get("max_gen_toks", NEW_TOKENS))
            cache, token = begin(self.tok_encode(text)[-max(1, limit - new) :])
            new_ids: list[int] = []
            answer = ""
            while len(new_ids) < new:
                logits = force(model, cache, torch.tensor([token], device=model.device))
                token = [int(logits.argmax())]
                if token[0] == self.eot_token_id:
                    break
                new_ids += token
                answer = tokenizer.decode(new_ids, skip_special_tokens=True)
                if any(stop in answer for stop in until):
                    break
            ends = [answer.index(stop) for stop in until if stop and stop in answer]
            return answer[: min(ends)] if ends else answer

    return Decoding()
