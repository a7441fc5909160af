"""The ranks of a calibration: the processes that torchrun starts, who does what, and how they wait for each other.

They share the work folder, where each writes the keys of its own samples and the projections of its own layers. Through
torchrun's store go only small values: what is ready, how many steps are done, heartbeats, and who reports why a run
ends. Rank 0 is the leader: it opens the work folder and makes the artifact.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bpc_calib.calibration.store import PatientStore
from bpc_calib.errors import WorkError, first_line

if TYPE_CHECKING:  # the import of this file is cheap
    from bpc_calib.calibration.plan import Plan

__all__ = ["JOIN", "STORE_GONE", "Ranks", "join", "layers_of", "samples_of"]

JOIN = 300.0  # seconds for all ranks to import what they need, from a slow disk
POLL = 0.2
STORE_GONE = "torchrun's store is gone, so its machine or its process has ended"


@dataclass
class Ranks:
    """This process among those of its run; one process alone has no store."""

    rank: int = 0
    count: int = 1
    store: Any = None  # PatientStore
    advice: str = "run the same command again"  # what to do after a run that has ended early
    began: float | None = None  # when the step in progress began; None between steps
    slowest: dict[str, float] = field(default_factory=dict)  # seconds of this rank's slowest step by stage
    stage: str = ""
    reports: bool = False  # this process reports why the run ends
    _done: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def broadcast(self, name: str, value: Any) -> None:
        """Send the others a value that JSON can hold."""
        if self.store is not None:
            self._ask(lambda: self.store.set(name, json.dumps(value)))

    def receive(self, name: str) -> Any:
        """Wait until another rank broadcasts this value, and return it. Raises `WorkError` if the store is gone."""
        while not self._ask(lambda: self.store.check([name])):
            time.sleep(POLL)
        return json.loads(self._ask(lambda: self.store.get(name)))

    def add(self, name: str, steps: int = 0) -> int:
        """Count steps, and return how many all ranks have counted in this run."""
        if self.store is None:
            self._done[name] = self._done.get(name, 0) + steps
            return self._done[name]
        return int(self._ask(lambda: self.store.add(f"done/{name}", steps)))

    def barrier(self, name: str, show: Callable[[], Any] = lambda: None) -> None:
        """Wait until every rank is here; `show` is called now and then. Raises `WorkError` if the store is gone."""
        if self.store is not None:
            arrived = self.add(f"barrier/{name}", 1)
            while arrived < self.count:
                time.sleep(POLL)
                arrived = self.add(f"barrier/{name}")
                show()

    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        """One step of work; its time bounds the later steps of the stage: `watching.patience`."""
        self.stage, self.began = stage, time.monotonic()
        yield
        self.slowest[stage] = max(self.slowest.get(stage, 0.0), time.monotonic() - self.began)
        self.began = None

    def claim(self, store: Any = None) -> bool:
        """Claim the report of why the run ends: True for one process of all, the first to ask."""
        with self._lock:
            if self.reports or self.store is None:
                return not self.reports
            try:
                self.reports = (store or self.store).add("reported", 1) == 1
            except RuntimeError:  # the store is gone, and with it the other machines
                self.reports = os.environ.get("LOCAL_RANK", "0") == "0"
            return self.reports

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as fault:
            raise WorkError(f"{STORE_GONE}: {self.advice}") from fault


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
    return Ranks(rank, count, PatientStore(PrefixStore(f"bpc/{attempt}", store)))


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
