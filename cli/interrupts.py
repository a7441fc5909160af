"""Ctrl-C that ends an answer and not the program, and SIGTERM that ends the program in order."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Terminated", "stopping_on_interrupt", "terminating"]


class Terminated(BaseException):
    """SIGTERM, as from `kill`, a container that stops, or a queue whose time is over."""


@contextmanager
def terminating() -> Iterator[None]:
    """In the block, SIGTERM raises `Terminated`, so that locks are released and temporary files removed."""

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
