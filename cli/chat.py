"""`bpc chat`: a conversation with a model whose steps attend to the best-ranked tokens only."""

import json
import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bpc_cli import decoding
from bpc_cli.chat_input import piped_messages, typed_messages
from bpc_cli.chat_template import Message, check_system, has_template, message, template_tokens
from bpc_cli.command import command
from bpc_cli.console import fail, note
from bpc_cli.conversation import Conversation
from bpc_cli.decoding_options import ONLINE, Artifact, CacheOptions, SamplingOptions, System
from bpc_cli.decoding_report import answer_line
from bpc_cli.empty_answer import why_empty
from bpc_cli.find_artifact import load_artifact
from bpc_cli.interrupts import stopping_on_interrupt
from bpc_cli.libraries import quiet_libraries
from bpc_cli.opening import LoadOptions, open_model, open_tokenizer, open_weights
from bpc_cli.options import Model

COMMANDS = "/reset begins anew, /quit or Ctrl-D ends the chat, Ctrl-C stops an answer"


@dataclass(frozen=True)
class ChatSamplingOptions(SamplingOptions):
    """The same with longer answers."""

    max_new_tokens: Annotated[int, typer.Option(help="Stop an answer after this many tokens.", min=1)] = 1024


@command
def chat(
    *,
    model: Model,
    artifact: Artifact = ONLINE,
    system: System = None,
    attended: CacheOptions,
    sampling: ChatSamplingOptions,
    load: LoadOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print each turn as one line of JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages except errors.")] = False,
) -> None:
    """Talk with a model; the KV cache is kept between turns, and each new token attends to its best-ranked tokens only.

    /reset begins anew, /quit or Ctrl-D ends the chat, Ctrl-C stops an answer. From a pipe, each line is one message.

    Example: bpc chat -m meta-llama/Llama-3.1-8B-Instruct -a llama.safetensors
    """
    rules, how = attended.rules(), sampling.arguments()
    quiet_libraries(quiet=quiet, warnings=not quiet)
    projections = None if artifact == ONLINE else load_artifact(artifact)
    from bpc_calib import BPCCache, enable

    opened, online = open_model(model, load), projections is None
    name = opened.description.id
    cache = BPCCache(opened.config, projections, seed=sampling.seed, **rules)
    tokenizer = open_tokenizer(opened)
    opening = _opening(tokenizer, system, name)
    ids = template_tokens(tokenizer, [*opening, message("user", "Hello")], name)
    loaded = open_weights(opened, quiet)
    enable(loaded)
    decoder = decoding.make_decoder(loaded, tokenizer, how, sampling.seed)
    decoder, _ = decoding.warm_up(
        decoder, ids, cache, sampling.max_new_tokens, online=online, compare=False, quiet=quiet
    )
    conversation = Conversation(decoder, cache, name, opened.description.context_limit, opening)
    _talk(conversation, sampling.max_new_tokens, as_json, quiet)


def _opening(tokenizer: Any, system: str | None, name: str) -> list[Message]:
    """The messages before the first of the user, for a model that can chat."""
    if not has_template(tokenizer):
        fail(f"{name} has no chat template, so it cannot chat: bpc generate continues a text")
    if system is None:
        return []
    check_system(tokenizer, system, name)
    return [message("system", system)]


def _talk(conversation: Conversation, most: int, as_json: bool, quiet: bool) -> None:
    """Answer messages until they end."""
    typed = sys.stdin is not None and sys.stdin.isatty()
    if typed and not quiet:
        note(f"Chatting with {conversation.name}: {COMMANDS}")
    for text in typed_messages() if typed else piped_messages():
        if text.strip() == "/quit":
            return
        if text.strip() == "/reset":
            conversation.reset()
        elif re.fullmatch(r"\s*/\w+\s*", text):
            note(f"{text.strip()} is no command: {COMMANDS}")
        elif typed:
            _answer_typed(conversation, text, most, as_json, quiet)
        else:
            _report(conversation.ask(text, most, not as_json), text, most, conversation, as_json, quiet)


def _answer_typed(conversation: Conversation, text: str, most: int, as_json: bool, quiet: bool) -> None:
    """Answer a message so that neither Ctrl-C nor a message that is too long ends the conversation."""
    from bpc_calib import InputError

    try:
        with stopping_on_interrupt() as criterion:
            turn = conversation.ask(text, most, not as_json, stopping_criteria=[criterion])
    except KeyboardInterrupt:
        note("")
        note("Interrupted: the message and its answer are forgotten")
    except InputError as fault:
        note(f"Not sent: {fault}")
    else:
        _report(turn, text, most, conversation, as_json, quiet)


def _report(turn: dict[str, Any], text: str, most: int, conversation: Conversation, as_json: bool, quiet: bool) -> None:
    """Print a turn as JSON, or one line about it on stderr; say why an answer is empty or was cut."""
    if as_json:
        print(json.dumps({"message": text, **turn}), flush=True)
    if quiet:
        return
    if not as_json:
        note(answer_line(turn), dim=True)
    if (why := why_empty(turn)) is not None:
        note(why)
    if turn["at_limit"] and turn["ended_by"] == "limit":
        note(f"The answer stops at the {conversation.limit:,} tokens of {conversation.name}: begin anew with /reset")
    elif turn["ended_by"] == "limit":
        note(f"The answer stops after {most:,} tokens: --max-new-tokens allows more")
