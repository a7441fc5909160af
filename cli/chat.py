"""`bpc chat`: a conversation with a model whose steps attend to the best-ranked tokens only.

The KV cache is kept: each turn feeds the model only what is new.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from bpc_cli import decoding
from bpc_cli.command import command
from bpc_cli.console import fail, note, plain, quiet_libraries
from bpc_cli.kept_cache import check_cache_file, check_config, fill_cache, keep_common, only_chat, save_cache
from bpc_cli.keyboard import stopping_on_interrupt, typed_messages, typing_ahead
from bpc_cli.opening import LoadOptions, load_artifact, open_model, open_tokenizer, open_weights
from bpc_cli.options import (
    ONLINE,
    Artifact,
    CacheOptions,
    KVDevice,
    Model,
    NoCompile,
    SamplingOptions,
    System,
    VerifyOptions,
)
from bpc_cli.prompt import Message, has_template, message, opening_messages, read_text, template_tokens

COMMANDS = "/reset begins anew, /quit or Ctrl-D ends the chat, Ctrl-C stops an answer"


@dataclass(frozen=True)
class ChatSamplingOptions(SamplingOptions):
    """The same with longer answers."""

    max_new_tokens: Annotated[int, typer.Option(help="Stop an answer after this many tokens.", min=1)] = 1024


@dataclass(frozen=True)
class BeginningOptions:
    """How the conversation begins."""

    system: System = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the first message, such as a long text with a question at its end."),
    ] = None
    session: Annotated[
        Path | None,
        typer.Option(
            help="Keep the conversation and its cache in this file: if it exists, go on where it ended; write it at "
            "the end.",
        ),
    ] = None


@command
def chat(
    *,
    model: Model,
    artifact: Artifact = ONLINE,
    beginning: BeginningOptions,
    attended: CacheOptions,
    sampling: ChatSamplingOptions,
    verify: VerifyOptions,
    load: LoadOptions,
    kv_device: KVDevice = None,
    no_compile: NoCompile = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each turn as one line of JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages except errors.")] = False,
) -> None:
    """Hold a conversation with a model.

    The KV cache is kept between turns, and each new token attends to its best-ranked tokens only. /reset begins anew,
    /quit or Ctrl-D ends the chat, Ctrl-C stops an answer. From a pipe, each line is one message.

    Example: bpc chat -m Qwen/Qwen3-8B -a qwen.safetensors --prompt-file report.txt
    """
    rules, how = attended.rules(), sampling.arguments()
    system, session = beginning.system, beginning.session
    first = [] if beginning.prompt_file is None else [read_text(beginning.prompt_file)]
    quiet_libraries(quiet=quiet, warnings=not quiet)
    with only_chat(session):
        kept = check_cache_file(session)
        if kept is not None and system is not None:
            fail(f"--system: the conversation in {session} has begun; leave it out, or give another --session")
        projections = None if artifact == ONLINE else load_artifact(artifact, model)
        from bpc_calib import BPCCache, enable

        opened = open_model(model, load)
        name = opened.description.id
        check_config(session, opened.description)
        cache = BPCCache(opened.config, projections, seed=sampling.seed, kv_device=kv_device, **rules)
        tokenizer = open_tokenizer(opened)
        if not has_template(tokenizer):
            fail(f"{name} has no chat template, so it cannot chat: bpc generate continues a text")
        opening = opening_messages(tokenizer, system, name)
        ids = template_tokens(tokenizer, [*opening, message("user", "Hello")], name)
        loaded = open_weights(opened, quiet)
        enable(loaded)
        decoder = decoding.make_decoder(loaded, tokenizer, how, sampling.seed, verify.arguments())
        if not no_compile:
            decoding.compile_decoder(decoder, sampling.max_new_tokens, quiet)
        decoder, _ = decoding.warm_up(decoder, ids, cache, sampling.max_new_tokens, compare=False, quiet=quiet)
        conversation = Conversation(decoder, cache, name, opened.description.context_limit, opening)
        with keeping(conversation, session, kept, quiet):
            _talk(conversation, first, sampling.max_new_tokens, as_json, quiet)


@dataclass
class Conversation:
    """The messages so far, and the cache with their tokens."""

    decoder: decoding.Decoder
    cache: Any
    name: str  # of the model
    limit: int | None  # tokens that the model takes in all
    opening: list[Message]  # the system message, if there is one
    messages: list[Message] = field(init=False)
    tokens: list[int] = field(init=False)  # of the cache, and at most one more

    def __post_init__(self) -> None:
        """Begin without a message."""
        self.reset()

    def reset(self) -> None:
        """Begin anew: forget every message except the system message."""
        self.messages, self.tokens = list(self.opening), []
        self.cache.reset()

    def resume(self, path: Path, messages: Any) -> None:
        """Go on with the conversation in a file."""
        if not messages or not all(isinstance(each, dict) and set(each) == {"role", "content"} for each in messages):
            fail(f"{path}: holds a saved cache, but no conversation: give another --session")
        self.tokens = fill_cache(path, self.cache, self.decoder.model)
        self.messages = messages
        self.opening = [each for each in messages[:1] if each["role"] == "system"]

    def save(self, path: Path, quiet: bool) -> None:
        """Write the conversation to a file, unless it is empty."""
        if self.cache.get_seq_length():
            save_cache(path, self.cache, self.decoder.model, self.tokens, {"messages": self.messages}, quiet)
        elif self.messages != self.opening:
            note(f"Not saved: the last message failed and took the cache with it; {path} is as before")
        elif path.exists() and path.stat().st_size:
            note(f"{path} still holds the earlier conversation: delete it to begin anew")

    def ask(self, text: str, most: int, show: bool, **more: Any) -> dict[str, Any]:
        """Answer a message with at most `most` tokens; return what `decode` measures, the bytes and the residual.

        The message and its answer join the conversation, also where the answer was stopped. If this fails, the
        conversation is as before; with sliding windows the next turn then feeds all of it again. `more` are arguments
        of `model.generate`.

        Raises:
            InputError: the model takes no token after this message.
        """
        messages = [*self.messages, message("user", text)]
        ids = template_tokens(self.decoder.tokenizer, messages, self.name)
        length = ids.shape[1]
        room, held = self._room(length, most), 0
        try:
            keep_common(self.cache, self.tokens, ids[0].tolist())
            held = self.cache.get_seq_length()
            turn = decoding.decode(self.decoder, ids, self.cache, room, show, **more)
            count = len(turn["tokens"])
            read = decoding.kv_bytes(self.cache, length, count) | decoding.residual(self.cache)
            read |= decoding.agreement(self.decoder, self.cache)
        except BaseException:  # Ctrl-C too: a part of the layers may hold the tokens of a pass that did not end
            self._go_back(held)
            raise
        self.messages = [*messages, message("assistant", turn["text"])]
        self.tokens = ids[0].tolist() + turn["tokens"]
        at_limit = self.limit is not None and length + count >= self.limit
        return {"prompt_tokens": length, **turn, "at_limit": at_limit, **read}

    def _go_back(self, held: int) -> None:
        """Forget all but the first `held` tokens; with sliding windows, which have lost earlier ones, all."""
        if held and not any(getattr(layer, "is_sliding", False) for layer in self.cache.layers):
            self.cache.back(held)
        else:
            held = 0
            self.cache.reset()
        self.tokens = self.tokens[:held]

    def _room(self, length: int, most: int) -> int:
        """How many tokens the answer may have."""
        from bpc_calib import InputError

        if self.limit is None:
            return most
        if length >= self.limit:
            raise InputError(
                f"with this message the conversation has {length:,} tokens, and {self.name} takes {self.limit:,}: send "
                "a shorter one, or begin anew with /reset"
            )
        return min(most, self.limit - length)


@contextmanager
def keeping(
    conversation: Conversation, path: Path | None, kept: Mapping[str, Any] | None, quiet: bool
) -> Iterator[None]:
    """Go on with the conversation of a file, and write it there at the end, whatever ends it; None: there is no file.

    `kept` is what was noted in the file; None: it does not exist yet.
    """
    if path is None:
        yield
        return
    if kept is not None:
        conversation.resume(path, kept.get("messages"))
        if not quiet:
            note(f"Going on with the conversation in {path}: {len(conversation.tokens):,} tokens")
    try:
        yield
    finally:
        conversation.save(path, quiet)


def _talk(conversation: Conversation, first: list[str], most: int, as_json: bool, quiet: bool) -> None:
    """Answer the first messages, then those of stdin until they end."""
    typed = sys.stdin is not None and sys.stdin.isatty()
    if typed and not quiet:
        note(f"Chatting with {conversation.name}: {COMMANDS}")
    for text in chain(first, typed_messages() if typed else piped_messages()):
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

    with typing_ahead(), stopping_on_interrupt() as criterion:
        try:
            turn = conversation.ask(text, most, not as_json, stopping_criteria=[criterion])
        except KeyboardInterrupt:
            note("Interrupted: the message and its answer are forgotten")
        except InputError as fault:
            note(f"Not sent: {fault}")
        else:
            with stopping_on_interrupt():  # the answer has ended: nothing is left to stop
                _report(turn, text, most, conversation, as_json, quiet)


def _report(turn: dict[str, Any], text: str, most: int, conversation: Conversation, as_json: bool, quiet: bool) -> None:
    """Print a turn as JSON, or one line about it on stderr; say why an answer is empty or was cut."""
    if as_json:
        print(json.dumps(plain({"message": text, **turn})), flush=True)
    if quiet:
        return
    if not as_json:
        note(decoding.answer_line(turn), dim=True)
        if "agreement" in turn:
            note(decoding.agreement_line(turn), dim=True)
    if turn["ended_by"] == "interrupt":
        note("Stopped: the conversation keeps the message and this part of the answer", dim=True)
    if (why := decoding.why_empty(turn)) is not None:
        note(why)
    if turn["at_limit"] and turn["ended_by"] == "limit":
        note(f"The answer stops at the {conversation.limit:,} tokens of {conversation.name}: begin anew with /reset")
    elif turn["ended_by"] == "limit":
        note(f"The answer stops after {most:,} tokens: --max-new-tokens allows more")


def piped_messages() -> Iterator[str]:
    """The lines of stdin that are not blank."""
    if sys.stdin is None:
        fail("no messages: pipe them in, one line each, or use a terminal")
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeError:
            fail(f"line {number} of the messages is not UTF-8 text")
        if text.strip():
            yield text
