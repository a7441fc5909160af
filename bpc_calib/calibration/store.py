"""Torchrun's store with calls that fail soon if it does not answer: those of torch wait for TCP, for many minutes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # in Python 3.10, not the built-in one
from typing import Any

__all__ = ["ANSWER", "PatientStore"]

ANSWER = 30.0  # seconds


class PatientStore:
    """A `torch.distributed.Store` for one thread; its calls raise `RuntimeError` if it does not answer."""

    def __init__(self, store: Any) -> None:
        self._store, self._lost = store, False

    def clone(self) -> "PatientStore":
        """Return the same store for another thread."""
        return PatientStore(self._store.clone())

    def check(self, names: list[str]) -> bool:
        """Return True if all these names have values."""
        return bool(self._ask(lambda: self._store.check(names)))

    def get(self, name: str) -> bytes:
        """Return the value of a name that has one."""
        found: bytes = self._ask(lambda: self._store.get(name))
        return found

    def set(self, name: str, value: str | bytes) -> None:
        """Give a name a value."""
        self._ask(lambda: self._store.set(name, value))

    def add(self, name: str, count: int) -> int:
        """Add to a counter and return its value."""
        return int(self._ask(lambda: self._store.add(name, count)))

    def _ask(self, question: Callable[[], Any]) -> Any:
        if self._lost:
            raise RuntimeError("the store does not answer")
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except Exception as fault:
                answer.set_exception(fault)

        threading.Thread(target=ask, daemon=True).start()  # no exit of the interpreter waits for it
        try:
            return answer.result(ANSWER)
        except Late as fault:
            self._lost = True
            raise RuntimeError(f"the store has not answered for {ANSWER:.0f} s") from fault
