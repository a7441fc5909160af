"""The work folder: the finished work of a calibration, so that a run that was stopped goes on where it was.

    journal.json        what must be the same to go on
    text/0.safetensors  the tokens of corpus 0, if it came from the Hub or several ranks need it
    samples/            one file per finished sample: its keys
    moments/            one file per group of samples: the running sums of the queries' moments
    layers/             one file per finished layer: its projections
    needs/              one file for each of `Plan.measured`: what each KV head needs
    artifact.safetensors

Every file is written in one step and has checksums.
"""

import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bpc_artifacts.errors import why
from bpc_calib.calibration.durable import locked, make_folder, write_file
from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.ranks import JOIN, Ranks
from bpc_calib.calibration.stored import (
    LAYERS,
    MOMENTS,
    NEEDS,
    SAMPLES,
    intact_layers,
    intact_needs,
    intact_samples,
    summed_samples,
)
from bpc_calib.errors import WorkError

__all__ = [
    "WorkFolder", "broadcast_work", "check_room", "check_same", "is_same_work", "join_work_folder", "open_work_folder",
    "remove_work",
]  # fmt: skip

LOCK, JOURNAL, ARTIFACT = ".lock", "journal.json", "artifact.safetensors"  # no corpus holds a hidden file
FOLDERS = (SAMPLES, MOMENTS, LAYERS, NEEDS, "text")
LEAST_ITEMSIZE = 2  # bytes per number of a key, before the model's dtype is known
SEEN_WITHIN = 10.0  # seconds for a new file to be seen on other machines
FORMAT = 5  # of the whole folder
OWN = re.compile(r"[0-9]+\.safetensors|\..+\.tmp")  # files in these folders
FIT = {"method", "bits"}  # settings of layers alone; what `method` says of positions is in `position_shift`
SHOWN = 3  # differences in a message


@dataclass(frozen=True)
class Journal:
    """What decides the bytes of the artifact."""

    settings: dict[str, Any]  # the plan with the model's description, the device, the versions
    sources: list[dict[str, Any]]  # the corpora whose text was read, with the hash of their tokens
    weights: dict[str, str]  # the `weights_identity` of the model; empty before it was loaded


@dataclass
class WorkFolder:
    """An open work folder. Only `journal` changes.

    What earlier runs have finished is the same in all ranks, so all know who does what.
    """

    path: Path
    plan: Plan
    device: torch.device
    journal: Journal
    samples: set[int]  # finished by earlier runs
    summed: dict[int, int]  # by earlier runs: the last sample in the sums of moments, by group
    layers: set[int]  # finished by earlier runs
    needs: set[int]  # which of `Plan.measured` earlier runs have measured
    ranks: Ranks

    @property
    def artifact(self) -> Path:
        """Where the artifact is kept until it is at its place."""
        return self.path / ARTIFACT

    def note(self, journal: Journal) -> None:
        """Replace the journal. Raises `WorkError`."""
        table = asdict(journal) | {"sha256": _sha256(journal)}
        write_file(self.path / JOURNAL, json.dumps(table, indent=1).encode())
        self.journal = journal


@contextmanager
def open_work_folder(path: Path, plan: Plan, device: torch.device, ranks: Ranks | None = None) -> Iterator[WorkFolder]:
    """Open the work folder of a calibration, or make it; remove it at the end if it holds no finished work.

    Of a calibration that differs only in how keys are fitted, the keys are used and the layers are removed.
    Of several ranks, rank 0 opens it, and returns when the others have joined.

    Args:
        path: the folder.
        plan: the settings.
        device: where keys are computed and fitted.
        ranks: this process among the ranks; None: it is alone.

    Raises:
        WorkError: another run uses the folder, it belongs to another calibration, its journal is damaged, it holds
            files of others, or it cannot be written.
    """
    ranks = ranks or Ranks()
    _check_ours(path)
    make_folder(path)
    with locked(
        path / LOCK, f"{path}: another run is using this work folder: wait for it, or choose another --work-dir"
    ):
        try:
            fresh = _new_journal(plan, device)
            journal = _read_journal(path / JOURNAL) if _has_work(path) else None
            if journal is None:
                _remove(path, [*FOLDERS, ARTIFACT])  # left by a run that was removing it
                journal = fresh
            elif (changed := _changed(journal.settings, fresh.settings)) and FIT.issuperset(changed):
                # The kept keys and the sums of moments are the same.
                _remove(path, [LAYERS, NEEDS, ARTIFACT])
                journal = replace(journal, settings=fresh.settings)
            check_same(path, journal.settings, fresh.settings)
            for name in FOLDERS:
                make_folder(path / name)
            summed = summed_samples(path, plan)
            unsummed = {sample for sample in plan.summed if sample > summed.get(sample // plan.group_size, -1)}
            samples = intact_samples(path, plan) - unsummed
            layers, needs = intact_layers(path, plan), intact_needs(path, plan)
            work = WorkFolder(path, plan, device, journal, samples, summed, layers, needs, ranks)
            check_room(work, LEAST_ITEMSIZE)
            work.note(journal)
            ranks.advice = _advice(path, plan)
            _show(work)
            yield work
        finally:
            if not _has_work(path):
                remove_work(path)


def join_work_folder(path: Path, plan: Plan, device: torch.device, ranks: Ranks) -> WorkFolder | None:
    """Join the work folder that rank 0 has opened; None if there is nothing left to do.

    Args:
        path: the folder, as this rank sees it.
        plan: the settings of this rank.
        device: where this rank computes.
        ranks: this process among the ranks.

    Raises:
        WorkError: this rank does not see that folder, or has another plan, processor or version than rank 0.
    """
    seen = ranks.receive("folder")
    until = time.monotonic() + SEEN_WITHIN
    while not (path / seen["sign"]).exists():
        if time.monotonic() > until:
            raise WorkError(
                f"rank {ranks.rank} does not see the work folder of rank 0, {seen['folder']}, as {path.absolute()}: "
                "give a --work-dir that all machines share"
            )
        time.sleep(0.1)
    check_same(path, seen["settings"], _new_journal(plan, device).settings)
    ranks.barrier("folder", within=JOIN)
    ranks.advice = _advice(path, plan)
    left = ranks.receive("work")
    if left is None:
        return None
    journal = Journal(seen["settings"], left["sources"], left["weights"])
    summed = {int(group): sample for group, sample in left["summed"].items()}
    samples, layers, needs = (set(left[name]) for name in (SAMPLES, LAYERS, NEEDS))
    return WorkFolder(path, plan, device, journal, samples, summed, layers, needs, ranks)


def is_same_work(path: Path, plan: Plan, device: torch.device) -> bool:
    """Return whether a folder has the work of a calibration with all these settings."""
    try:
        journal = _read_journal(path / JOURNAL)
    except WorkError:
        return False
    return journal is not None and not _changed(journal.settings, _new_journal(plan, device).settings)


def broadcast_work(work: WorkFolder) -> None:
    """Broadcast what is finished, so that all ranks know who does what; the text is in the folder."""
    work.ranks.broadcast(
        "work",
        {
            "samples": sorted(work.samples),
            "summed": work.summed,
            "layers": sorted(work.layers),
            "needs": sorted(work.needs),
            "sources": work.journal.sources,
            "weights": work.journal.weights,
        },
    )


def check_room(work: WorkFolder, itemsize: int) -> None:
    """Raise `WorkError` unless the disk has room for the rest of the work, with keys of `itemsize` bytes per number."""
    stored = sum(file.stat().st_size for name in FOLDERS for file in (work.path / name).iterdir())
    needed = max(0, work.plan.work_bytes(itemsize, work.ranks.count) - stored)
    free = shutil.disk_usage(work.path).free
    if needed > free:
        raise WorkError(
            f"{work.path}: the work needs {needed:,} bytes and {free:,} are free: "
            f"free {needed - free:,} bytes, or choose a --work-dir on another disk"
        )


def check_same(folder: Path, before: Any, now: Any) -> None:
    """Raise `WorkError` if two tables are not equal; the message has the entries that differ."""
    old, new = dict(_entries(before)), dict(_entries(now))
    names = _changed(old, new)
    if names:
        shown = "; ".join(
            f"{name}: {_short(old, name)} in the work folder, {_short(new, name)} now" for name in names[:SHOWN]
        )
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise WorkError(
            f"{folder} has the work of another calibration ({shown}{more}): "
            "use the settings of that one, choose another --work-dir, or delete the folder"
        )


def remove_work(path: Path) -> None:
    """Remove the files of a work folder, and the folder if nothing else is in it; the caller holds its lock."""
    # The journal and the artifact stay until the rest is gone: by them the same command knows that it is done.
    _remove(path, [*(file.name for file in path.glob(".*.tmp")), *FOLDERS, ARTIFACT, JOURNAL, LOCK])
    with suppress(OSError):
        path.rmdir()


def _show(work: WorkFolder) -> None:
    """Wait until the other ranks have seen a file of a new name, which no machine can have seen before."""
    if work.ranks.count > 1:
        sign = work.path / f".{secrets.token_hex(8)}.tmp"
        write_file(sign, b"")
        table = {"sign": sign.name, "folder": str(work.path.absolute()), "settings": work.journal.settings}
        work.ranks.broadcast("folder", table)
        work.ranks.barrier("folder", within=JOIN)
        sign.unlink()


def _advice(path: Path, plan: Plan) -> str:
    number = "any number" if plan.model.ranks == 1 else "the same number"  # shards of a model round otherwise
    return f"the finished work is in {path}, and the same command goes on, with {number} of ranks"


def _has_work(path: Path) -> bool:
    files = [path / ARTIFACT, *(file for name in FOLDERS for file in (path / name).glob("*.safetensors"))]
    return any(file.exists() for file in files)


def _remove(path: Path, names: list[str]) -> None:
    """Remove files, and from folders the files that a calibration writes: what else is there stays."""
    for name in names:
        own = [path / name]
        if own[0].is_dir():
            own = [file for file in own[0].iterdir() if OWN.fullmatch(file.name)]
        for file in own:
            with suppress(OSError):
                file.unlink()
        with suppress(OSError):
            (path / name).rmdir()


def _check_ours(path: Path) -> None:
    """Raise `WorkError` unless a folder is new, has the journal of a calibration, or only what a killed one leaves."""
    try:
        str(path.absolute()).encode()
        names = {file.name for file in path.iterdir()} if path.exists() else set()
        empty = {name for name in names & {*FOLDERS} if (path / name).is_dir() and not any((path / name).iterdir())}
    except UnicodeError as fault:
        raise WorkError(f"{path!r}: its name is not UTF-8 text: give another --work-dir") from fault
    except OSError as fault:
        raise WorkError(f"{path}: is not a folder that can be read: {why(fault)}") from fault
    others = sorted(name for name in names - {LOCK, *empty} if not name.endswith(".tmp"))
    if others and (JOURNAL not in names or _is_foreign(path / JOURNAL)):
        raise WorkError(f"{path}: holds other files ({others[0]}): give a new or an empty folder as --work-dir")


def _is_foreign(path: Path) -> bool:
    """Return whether a file is JSON, and no journal of a calibration, whole or damaged."""
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return not (isinstance(table, dict) and {"settings", "sources", "weights", "sha256"} <= table.keys())


def _new_journal(plan: Plan, device: torch.device) -> Journal:
    """Return the journal of a run that has done nothing."""
    # Kernels of another processor sum in another order, and those of torch on a CPU with other threads, in some models.
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"
    settings = asdict(plan) | {
        "device": f"{device.type} ({processor})",
        "versions": {name: version(name) for name in ("bpc-calib", "torch", "transformers")} | {"work folder": FORMAT},
    }
    del settings["method"]["summary"]  # only words
    return Journal(json.loads(json.dumps(settings)), [], {})


def _read_journal(path: Path) -> Journal | None:
    """Read a journal; None if there is none.

    Raises:
        WorkError: it is damaged.
    """
    try:
        table = json.loads(path.read_bytes())
        found = Journal(table["settings"], table["sources"], table["weights"])
        if table["sha256"] != _sha256(found):
            raise ValueError
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise WorkError(f"{path}: damaged, so its work cannot be used: delete {path.parent} to begin anew") from fault
    return found


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names of the entries that differ."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _entries(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(table: dict[str, Any], name: str) -> str:
    shown = str(table.get(name, "nothing"))
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def _sha256(journal: Journal) -> str:
    return hashlib.sha256(json.dumps(asdict(journal), sort_keys=True).encode()).hexdigest()
