"""Messages as the tokens that a model's chat template makes of them."""

from typing import Any

from bpc_cli.console import fail

__all__ = ["Message", "check_system", "has_template", "message", "template_tokens"]

Message = dict[str, str]


def message(role: str, text: str) -> Message:
    """One message of a conversation; the role is system, user or assistant."""
    return {"role": role, "content": text}


def has_template(tokenizer: Any) -> bool:
    """Whether the model came with a chat template, so that it can answer messages."""
    return bool(tokenizer.chat_template)


def template_tokens(tokenizer: Any, messages: list[Message], name: str) -> Any:
    """Token ids `[1, N]` of a conversation up to the answer; the template itself writes BOS where there is one."""
    made = _applied(tokenizer, messages, tokenize=True, return_tensors="pt", return_dict=True)
    if isinstance(made, Exception):
        fail(f"the chat template of {name} refuses the conversation: {made}")
    return made["input_ids"]


def check_system(tokenizer: Any, system: str, name: str) -> None:
    """Refuse a system message that the template refuses or silently leaves out."""
    made = _applied(tokenizer, [message("system", system), message("user", "x")], tokenize=False)
    if isinstance(made, Exception) or system.strip() not in made:
        fail(f"--system: the chat template of {name} takes no system message: write it into the first message instead")


def _applied(tokenizer: Any, messages: list[Message], **how: Any) -> Any:
    """What the template makes of the messages, or its error."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **how)
    except (TemplateError, TypeError, ValueError) as fault:
        return fault
