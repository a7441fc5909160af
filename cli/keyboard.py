"""What a user types in a chat on a terminal: messages, keys while an answer is written, and Ctrl-C."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bpc_cli.console import note

__all__ = ["stopping_on_interrupt", "typed_messages", "typing_ahead"]

PROMPT = "> "
# Terminals mark what is pasted, so that readline takes all its lines as one message.
MARKING, NOT_MARKING = "\x1b[?2004h", "\x1b[?2004l"


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


@contextmanager
def typing_ahead() -> Iterator[None]:
    """In the block, the terminal keeps what is typed for the next message, and does not show it within the answer.

    Ctrl-C then keeps it too, and pasted lines stay one message. Without readline, or where `input` does not use it,
    nothing changes.
    """
    if "readline" not in sys.modules or not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    import readline
    import termios

    marks = "libedit" not in (readline.__doc__ or "") and os.environ.get("TERM", "dumb") != "dumb"  # they know none
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    during = termios.tcgetattr(keys)
    during[3] = during[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH  # readline edits what it finds later
    termios.tcsetattr(keys, termios.TCSADRAIN, during)
    print(MARKING * marks, end="", flush=True)
    try:
        yield
    finally:
        print(NOT_MARKING * marks, end="", flush=True)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextmanager
def stopping_on_interrupt() -> Iterator[Callable[..., Any]]:
    """In the block, the first Ctrl-C makes the given stopping criterion end the generation after its current step.

    So the cache stays whole. A second Ctrl-C interrupts at once.
    """
    import torch

    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def criterion(ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((ids.shape[0],), asked, device=ids.device)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield criterion
    finally:
        signal.signal(signal.SIGINT, before)
