"""The prompt of `bpc generate`: from an option, a file or stdin, as tokens."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bpc_cli.console import fail

__all__ = ["PromptOptions", "read_prompt", "tokenize"]


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompt comes from."""

    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the prompt. Without --prompt and --prompt-file, stdin is read."),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message in the model's chat template.")
    ] = False


def read_prompt(options: PromptOptions) -> str:
    """The text of the prompt, checked."""
    prompt, file = options.prompt, options.prompt_file
    if prompt is not None and file is not None:
        raise typer.BadParameter("give --prompt or --prompt-file, not both")
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("give --prompt or --prompt-file, or pipe the prompt in")
    try:
        if prompt is None:
            raw = sys.stdin.buffer.read() if file is None else Path(os.path.expanduser(file)).read_bytes()
            prompt = raw.decode().removesuffix("\n")
        prompt.encode()
    except OSError as fault:
        fail(f"{file}: the prompt cannot be read: {fault.strerror}")
    except UnicodeError:
        fail(f"{file or 'the prompt'} is not UTF-8 text")
    if not prompt.strip():
        fail(f"{file or 'the prompt'} is empty")
    return prompt


def tokenize(tokenizer: Any, text: str, chat: bool, name: str) -> Any:
    """Token ids `[1, N]` of a prompt for the model of this name."""
    if not chat:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    elif not tokenizer.chat_template:
        fail(f"{name} has no chat template: leave out --chat")
    else:
        message = {"role": "user", "content": text}
        ids = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    if not ids.shape[1]:
        fail("the prompt has no tokens")
    return ids
