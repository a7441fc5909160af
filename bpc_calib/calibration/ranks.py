"""The ranks of a calibration: the processes that torchrun starts, who does what, and how they wait for each other.

They share the work folder, where each writes the keys of its own samples and the projections of its own layers. Through
torchrun's store go only small values: what is ready, how many steps are done, and who reports why a run ends. Rank 0 is
the leader: it opens the work folder and makes the artifact.

When a rank dies, torchrun ends the others on its machine. A rank that is stopped or stuck, or whose machine is gone, is
noticed by those that wait for it. A store that hangs, because its machine has lost power, is left to TCP, which gives
up after some 15 minutes: the timeout of torch's store does not bound these calls.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bpc_calib.errors import WorkError, first_line

if TYPE_CHECKING:  # the import of this file is cheap
    from bpc_calib.calibration.plan import Plan

__all__ = ["JOIN", "LOADING", "Ranks", "join", "layers_of", "samples_of"]

JOIN = 300.0  # seconds for all ranks to import what they need, from a slow disk
LOADING = 6 * 3600.0  # seconds for the text or the model, which may be downloads
FIRST_STEP, STEP = 3600.0, 600.0  # seconds that a step may take: the first one of a stage, and at least each later one
TIMES_SLOWER = 10  # than the slowest step so far
POLL = 0.2
STORE_GONE = "torchrun's store is gone, so its machine or its process has ended"


@dataclass
class Ranks:
    """This process among those of its run; one process alone has no store.

    All methods but `claim` raise `WorkError` if the store is gone, or if another rank has claimed the report.
    """

    rank: int = 0
    count: int = 1
    store: Any = None  # torch.distributed.Store
    advice: str = "run the same command again"  # what to do after a run that has ended early
    slowest: dict[str, float] = field(default_factory=dict)  # seconds of this rank's slowest step by stage
    _done: dict[str, int] = field(default_factory=dict)

    def broadcast(self, name: str, value: Any) -> None:
        """Send the others a value that JSON can hold; rank 0 alone does this."""
        if self.store is not None:
            self._ask(lambda: self.store.set(name, json.dumps(value)))

    def receive(self, name: str) -> Any:
        """Wait until rank 0 broadcasts this value, and return it. Raises `WorkError` if that takes too long."""
        self._wait({0: name}, LOADING)
        return json.loads(self._ask(lambda: self.store.get(name)))

    def add(self, name: str, steps: int = 0) -> int:
        """Count steps, and return how many all ranks have counted in this run."""
        if self.store is None:
            self._done[name] = self._done.get(name, 0) + steps
            return self._done[name]
        return int(self._ask(lambda: self.store.add(f"done/{name}", steps)))

    def barrier(self, name: str, show: Callable[[], Any] = lambda: None, *, within: float | None = None) -> None:
        """Wait until every rank is here.

        Args:
            name: of the barrier; that after the steps of a stage has the name of the stage.
            show: is called now and then, and returns what changes as others work.
            within: seconds without such a change; None: `patience`.

        Raises:
            WorkError: nothing has changed for so long; the message names the ranks that are not here.
        """
        if self.store is not None:
            self._ask(lambda: self.store.set(f"here/{name}/{self.rank}", "1"))
            signs = {rank: f"here/{name}/{rank}" for rank in range(self.count)}
            self._wait(signs, self.patience(name) if within is None else within, show)

    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        """One step of work; its time bounds the later steps of the stage: `patience`."""
        began = time.monotonic()
        yield
        self.slowest[stage] = max(self.slowest.get(stage, 0.0), time.monotonic() - began)

    def patience(self, stage: str) -> float:
        """Return the seconds after which a step of another rank counts as stuck."""
        return max(STEP, TIMES_SLOWER * self.slowest[stage]) if stage in self.slowest else FIRST_STEP

    def claim(self) -> bool:
        """Claim the report of why the run ends: True for one process of all, the first to ask."""
        try:
            return int(self.store.add("reported", 1)) == 1
        except RuntimeError:  # the store is gone, and with it the other machines
            return os.environ.get("LOCAL_RANK", "0") == "0"

    def _wait(self, signs: dict[int, str], bound: float, show: Callable[[], Any] = lambda: None) -> None:
        """Wait until each of these ranks has set the value of this name."""
        waited, before = 0.0, None
        while not self._has(*signs.values()):
            if waited > bound:
                silent = ", ".join(str(rank) for rank, name in signs.items() if not self._has(name))
                raise WorkError(f"waited {bound:.0f} s for rank {silent} (dead, stopped or stuck): {self.advice}")
            time.sleep(POLL)
            waited += POLL  # and not the time that this process was stopped itself
            if (now := show()) != before:
                waited, before = 0.0, now

    def _has(self, *names: str) -> bool:
        return bool(self._ask(lambda: self.store.check(list(names))))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            if not self.store.check(["reported"]):
                return question()
        except RuntimeError as fault:
            raise WorkError(f"{STORE_GONE}: {self.advice}") from fault
        raise WorkError("another rank has ended the run, and says why")


def join() -> Ranks:
    """Join the ranks that torchrun started, by the variables of the environment that it sets.

    Raises:
        WorkError: torchrun's store cannot be reached.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=JOIN)))
    except (RuntimeError, ValueError) as fault:
        raise WorkError(f"the ranks cannot rendezvous ({first_line(fault)}): start them with torchrun") from fault
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Ranks(rank, count, PrefixStore(f"bpc/{attempt}", store))


def samples_of(plan: "Plan", finished: set[int], rank: int, ranks: int) -> list[int]:
    """Return the samples that a rank runs, ascending: those left in every `ranks`-th group that has some left.

    Ranks with a shard of the model each run every sample together.

    Args:
        plan: the settings; `plan.groups` are the groups.
        finished: samples that are done.
        rank: this process, from 0.
        ranks: number of processes.
    """
    if plan.model.ranks > 1:
        rank, ranks = 0, 1
    left = [unfinished for samples in plan.groups if (unfinished := [each for each in samples if each not in finished])]
    return [sample for samples in left[rank::ranks] for sample in samples]


def layers_of(plan: "Plan", finished: set[int], rank: int, ranks: int) -> list[int]:
    """Return the layers that a rank fits, ascending: every `ranks`-th of those that are left.

    Args:
        plan: the settings.
        finished: layers that are done.
        rank: this process, from 0.
        ranks: number of processes.
    """
    return [layer for layer in plan.model.full_layers if layer not in finished][rank::ranks]
