"""Ctrl-C that ends an answer and not the program."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["stopping_on_interrupt"]


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
