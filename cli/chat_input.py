"""The messages of `bpc chat`: typed on a terminal, or one line each from a pipe."""

import sys
from collections.abc import Iterator
from contextlib import suppress

from bpc_cli.console import fail, note

__all__ = ["piped_messages", "typed_messages"]

PROMPT = "> "


def typed_messages() -> Iterator[str]:
    """The lines that a user types, with arrow keys and a history, until Ctrl-D."""
    with suppress(ImportError):  # Windows has none
        import readline  # `input` uses it once it is imported

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    while True:
        try:
            text = input(_prompt())
            text.encode()
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("")
            note("Ctrl-D or /quit ends the chat")
            continue
        except UnicodeError:
            note("The message is not UTF-8 text; it was not sent")
            continue
        if text.strip():
            yield text


def _prompt() -> str:
    """What `input` shows; it would write to stdout, so it shows nothing where answers go to a file."""
    if sys.stdout.isatty():
        return PROMPT
    print(PROMPT, end="", file=sys.stderr, flush=True)
    return ""


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
