"""The prompt of `bpc generate`: from an option, a file or stdin, as tokens."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bpc_cli.chat_template import check_system, has_template, message, template_tokens
from bpc_cli.console import fail
from bpc_cli.decoding_options import System
from bpc_cli.ranks import ranks

__all__ = ["PromptOptions", "read_prompt", "tokenize"]


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompt comes from."""

    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Message to answer, or text to continue.")] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the prompt. Without --prompt and --prompt-file, stdin is read."),
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
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("give --prompt or --prompt-file, or pipe the prompt in")
    if prompt is None and file is None and ranks() > 1:
        raise typer.BadParameter("give --prompt or --prompt-file: the processes of torchrun cannot share a pipe")
    try:
        if prompt is None:
            raw = sys.stdin.buffer.read() if file is None else Path(os.path.expanduser(file)).read_bytes()
            prompt = raw.decode().removesuffix("\n")
        prompt.encode()
    except OSError as fault:
        from bpc_artifacts.errors import why

        fail(f"{file}: the prompt cannot be read: {why(fault)}")
    except UnicodeError:
        fail(f"{file or 'the prompt'} is not UTF-8 text")
    if not prompt.strip():
        fail(f"{file or 'the prompt'} is empty")
    return prompt


def tokenize(tokenizer: Any, text: str, options: PromptOptions, name: str) -> tuple[Any, bool]:
    """Token ids `[1, N]` of a prompt for the model of this name, and whether they are in its chat template."""
    templated = has_template(tokenizer) and not options.raw
    if options.system is not None and not templated:
        reason = "--raw leaves the chat template out" if options.raw else f"{name} has no chat template"
        fail(f"--system: {reason}, so no system message can be sent: write it into the prompt instead")
    if not templated:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    else:
        messages = [message("user", text)]
        if options.system is not None:
            check_system(tokenizer, options.system, name)
            messages.insert(0, message("system", options.system))
        ids = template_tokens(tokenizer, messages, name)
    if not ids.shape[1]:
        fail("the prompt has no tokens")
    return ids, templated
