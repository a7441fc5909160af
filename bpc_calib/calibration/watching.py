"""Each rank watches the others: a dead, stopped or stuck rank ends the run in bounded time, with one line.

A thread of each rank sends heartbeats through torchrun's store and reads those of the others. It ends the process
itself, because the main thread may be deep in a computation.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bpc_calib.calibration.ranks import JOIN, STORE_GONE, Ranks

__all__ = ["patience", "watching"]

BEAT = 1.0  # seconds between two heartbeats
STALE = 15.0  # seconds without a heartbeat after which a rank counts as gone
LINGER = 3 * BEAT  # the process that reports stays so long: the others see that, and report nothing
FIRST_STEP, STEP = 3600.0, 600.0  # seconds that a step may take: the first one of a stage, and at least each later one
TIMES_SLOWER = 10  # than the slowest step so far
LEFT = b"left"
SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "torchrun has ended the run (SIGTERM), as it does when a process has died",
}


def patience(slowest: float | None) -> float:
    """Return the seconds after which a step counts as stuck, where the slowest one so far took `slowest`."""
    return FIRST_STEP if slowest is None else max(STEP, TIMES_SLOWER * slowest)


@contextmanager
def watching(ranks: Ranks, say: Callable[[str], None]) -> Iterator[None]:
    """Watch the other ranks, and this one, during the block.

    When one is gone or stuck, or at a signal of `SIGNALS`, every process ends with status 1, and one of them calls
    `say` with the reason before. A block that ends with an error ends the other ranks, too, if it has asked for
    `ranks.claim`.
    """
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    # The wakeup reaches the thread whatever this one does.
    before = {each: signal.signal(each, lambda *_: None) for each in SIGNALS}
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    ending = threading.Event()
    store = ranks.store.clone()  # a store answers one thread at a time
    thread = threading.Thread(target=_watch, args=(ranks, store, wake, ending, say))
    thread.start()
    try:
        yield
    except BaseException:  # the thread lingers, no signal of these ends it, and the interpreter waits for it
        signal.set_wakeup_fd(-1)
        ending.set()
        raise
    signal.set_wakeup_fd(-1)
    for each, handler in before.items():
        signal.signal(each, handler)
    ending.set()
    waker.send(b"\0")
    thread.join()
    with suppress(RuntimeError):  # the store is gone, and nobody is left to read it
        ranks.store.set(_beat(ranks.rank), LEFT)


def _watch(ranks: Ranks, store: Any, wake: socket.socket, ending: threading.Event, say: Callable[[str], None]) -> None:
    """Send heartbeats and read them until the block ends, or end the process."""
    last: dict[int, bytes] = {}
    silent = {rank: 0.0 for rank in range(ranks.count) if rank != ranks.rank}
    step, busy = ranks.began, 0.0  # when the step of this rank began, and its seconds
    beats, turned = 0, time.monotonic()
    while not ending.is_set():
        woken = select.select([wake], [], [], BEAT)[0]
        signals = wake.recv(64) if woken else b""
        passed = min(time.monotonic() - turned, 2 * BEAT)  # not the time that this process was stopped itself
        turned, beats = time.monotonic(), beats + 1
        stage, began = ranks.stage, ranks.began  # once, and in this order: the main thread sets them in it
        busy = busy + passed if began is not None and began == step else 0.0
        step = began
        try:
            if store.check(["reported"]) and not ranks.reports:
                os._exit(1)
            store.set(_beat(ranks.rank), str(beats))
            _update(store, last, silent, passed)
            reason = _reason(ranks, stage, last, silent, busy)
        except RuntimeError:
            reason = STORE_GONE
        reason = next((SIGNALS[each] for each in SIGNALS if each in signals), reason)
        if reason:
            _end(ranks, store, reason, say)
    if ranks.reports:
        time.sleep(LINGER)


def _update(store: Any, last: dict[int, bytes], silent: dict[int, float], passed: float) -> None:
    """Update the last heartbeat of each rank, and the seconds without a new one."""
    for rank in silent:
        beat = store.get(_beat(rank)) if store.check([_beat(rank)]) else None
        silent[rank] = 0.0 if beat == LEFT or beat != last.get(rank) else silent[rank] + passed
        if beat is not None:
            last[rank] = beat


def _reason(ranks: Ranks, stage: str, last: dict[int, bytes], silent: dict[int, float], busy: float) -> str | None:
    """Why the run must end; None if all is well."""
    for rank, seconds in silent.items():
        if rank in last and seconds > STALE:
            return f"rank {rank} has not answered for {STALE:.0f} s, so it is dead or stopped"
        if seconds > JOIN:
            return f"rank {rank} has not come for {JOIN:.0f} s"
    if busy > patience(ranks.slowest.get(stage)):
        return f"rank {ranks.rank} has made no progress for {busy / 60:.0f} min"
    return None


def _end(ranks: Ranks, store: Any, reason: str, say: Callable[[str], None]) -> None:
    """End the process, and say why if no other process does."""
    if ranks.claim(store):
        say(f"{reason}: {ranks.advice}")
        time.sleep(LINGER)
    elif ranks.reports:  # the main thread is about to end with an error of its own
        return
    os._exit(1)


def _beat(rank: int) -> str:
    return f"beat/{rank}"
