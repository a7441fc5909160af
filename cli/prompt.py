"""Prompts and messages as tokens: from an option, a file or stdin, in the model's chat template or as they are."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bpc_cli.console import fail
from bpc_cli.options import System
from bpc_cli.ranks import ranks

Message = dict[str, str]


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompt comes from."""

    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Message to answer, or text to continue.")] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the prompt. Without --prompt and --prompt-file, stdin is read."),
    ] = None
    prompt_cache: Annotated[
        Path | None,
        typer.Option(
            help="Keep what was read of the prompt in this file, for later prompts that begin with the same text."
        ),
    ] = None
    system: System = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the model's chat template.")
    ] = False


def read_prompt(options: PromptOptions) -> str:
    """The text of the prompt, checked."""
    prompt, file = options.prompt, options.prompt_file
    if prompt is not None and file is not None:
        raise typer.BadParameter("give --prompt or --prompt-file, not both")
    if prompt is not None and not prompt.strip():
        raise typer.BadParameter("--prompt is empty")
    if options.system is not None and options.raw:
        raise typer.BadParameter("--raw leaves the chat template out, and --system with it: write it into the prompt")
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("give --prompt or --prompt-file, or pipe the prompt in")
    if prompt is None and file is None and ranks() > 1:
        raise typer.BadParameter("give --prompt or --prompt-file: the processes of torchrun cannot share a pipe")
    return read_text(file, prompt)


def read_text(file: Path | None, text: str | None = None) -> str:
    """The text itself, that of a file, or that of stdin, without its last newline and checked."""
    name = file or "the prompt"
    try:
        if text is None:
            raw = sys.stdin.buffer.read() if file is None else Path(os.path.expanduser(file)).read_bytes()
            text = raw.decode().removesuffix("\n")
        text.encode()
    except OSError as fault:
        from bpc_artifacts.errors import why

        fail(f"{name}: the prompt cannot be read: {why(fault)}")
    except UnicodeError as fault:
        from bpc_calib.errors import not_text

        fail(f"{name} is {not_text(fault)}")
    if not text.strip():
        more = ": give --prompt or --prompt-file, or pipe one in" if file is None else ""
        fail(f"{name} is empty{more}")
    return text


def tokenize(tokenizer: Any, text: str, options: PromptOptions, name: str) -> tuple[Any, bool]:
    """Token ids `[1, N]` of a prompt for the model of this name, and whether they are in its chat template."""
    templated = has_template(tokenizer) and not options.raw
    if options.system is not None and not templated:
        fail(f"--system: {name} has no chat template, so it cannot be sent: write it into the prompt instead")
    if not templated:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    else:
        messages = [*opening_messages(tokenizer, options.system, name), message("user", text)]
        ids = template_tokens(tokenizer, messages, name)
    if not ids.shape[1]:
        fail("the prompt has no tokens")
    return ids, templated


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


def opening_messages(tokenizer: Any, system: str | None, name: str) -> list[Message]:
    """The messages before the first of the user; refuse a system message that the template refuses or leaves out."""
    if system is None:
        return []
    opening = [message("system", system)]
    made = _applied(tokenizer, [*opening, message("user", "x")], tokenize=False)
    if isinstance(made, Exception) or system.strip() not in made:
        fail(f"--system: the chat template of {name} takes no system message: write it into the first message instead")
    return opening


def _applied(tokenizer: Any, messages: list[Message], **how: Any) -> Any:
    """What the template makes of the messages, or its error."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **how)
    except (TemplateError, TypeError, ValueError) as fault:
        return fault
