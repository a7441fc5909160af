"""What stands around the text and the question of a prompt: the model's chat template, where it has one."""

from dataclasses import dataclass
from typing import Any

from bpc_calib.errors import InputError
from bpc_calib.text.samples import beginning

__all__ = ["Frame", "make_frame"]

MESSAGE = "<text and question>"  # stands for the user's message while the template is written


@dataclass(frozen=True)
class Frame:
    """`before`: the tokens before the text; `after`: between the question and the beginning of the answer."""

    before: list[int]
    after: str


def make_frame(tokenizer: Any, raw: bool = False) -> Frame:
    """Return the tokenizer's chat template around one user's message; with `raw` or without a template only its BOS.

    Raises:
        InputError: the template does not show the message.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return Frame(beginning(tokenizer), "")
    messages = [{"role": "user", "content": MESSAGE}]
    try:
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as fault:
        raise InputError(f"the model's chat template cannot be used: {fault}; --raw leaves it out") from fault
    before, found, after = whole.partition(MESSAGE)
    if not found:
        raise InputError("the model's chat template does not show the user's message; --raw leaves the template out")
    return Frame(list(tokenizer(before, add_special_tokens=False)["input_ids"]), after)
