"""The journal of a work folder: what must be the same for a run to go on with the work of another."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bpc_calib.calibration.durable import write_file
from bpc_calib.calibration.plan import Plan
from bpc_calib.errors import WorkError

__all__ = ["Journal", "check_same", "new_journal", "only_fitted_otherwise", "read_journal", "write_journal"]

FORMAT = 5  # of the whole folder
FIT = {"method", "codes", "bits"}  # settings of layers alone; what `method` says of positions is in `position_shift`
SHOWN = 3  # differences in a message


@dataclass(frozen=True)
class Journal:
    """What decides the bytes of the artifact."""

    settings: dict[str, Any]  # the plan with the model's description, the device, the versions
    sources: list[dict[str, Any]]  # the corpora whose text was read, with the hash of their tokens
    weights: dict[str, str]  # the `weights_identity` of the model; empty before it was loaded


def new_journal(plan: Plan, device: torch.device) -> Journal:
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


def read_journal(path: Path) -> Journal | None:
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


def write_journal(path: Path, journal: Journal) -> None:
    """Write a journal in one step. Raises `WorkError`."""
    write_file(path, json.dumps(asdict(journal) | {"sha256": _sha256(journal)}, indent=1).encode())


def only_fitted_otherwise(before: Journal, now: Journal) -> bool:
    """Return True if the settings differ, but the kept keys and the sums of moments are the same."""
    names = {
        name for name in {**before.settings, **now.settings} if before.settings.get(name) != now.settings.get(name)
    }
    return bool(names) and names <= FIT


def check_same(folder: Path, before: Any, now: Any) -> None:
    """Raise `WorkError` if two tables are not equal; the message has the entries that differ."""
    old, new = dict(_entries(before)), dict(_entries(now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if names:
        shown = "; ".join(
            f"{name}: {_short(old, name)} in the work folder, {_short(new, name)} now" for name in names[:SHOWN]
        )
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise WorkError(
            f"{folder} has the work of another calibration ({shown}{more}): "
            "use the settings of that one, choose another --work-dir, or delete the folder"
        )


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
