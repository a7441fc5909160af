"""The file that `bpc eval --output` wrote, read again for the artifact that it was made with."""

import json
from pathlib import Path
from typing import Any, NoReturn

from bpc_artifacts import ProjectionArtifact
from bpc_artifacts.errors import why
from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import FIGURES, method_of
from bpc_calib.evaluation.tasks import TASKS, TEXT

__all__ = ["MOST_BYTES", "read_result"]

MOST_BYTES = 64 << 20  # far above every result
MOST = 1e100  # far above every number in one; an integer of JSON may be too large for a float


def read_result(path: Path, artifact: ProjectionArtifact) -> dict[str, Any]:
    """Return the `model`, `settings` and `rows` of a result; each row has only what tables show, checked.

    Older results do not name the bytes of the projections; there, the settings of the calibration have to do.

    Raises:
        InputError: the file is no such result, or it was made with another model or other projections.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
        if not path.is_file() and not path.is_dir():  # a read from a pipe or a device would never end
            raise ValueError("not a regular file")
        found = json.loads(path.read_bytes(), parse_constant=_no_constant)
        result = {
            "model": _of(found["model"], str),
            "settings": _settings(found["settings"]),
            "rows": [_row(row) for row in _of(found["rows"], list)],
        }
        made_with = found["artifact"], found.get("payload_sha256", artifact.metadata["payload_sha256"])
    except OSError as fault:
        raise InputError(f"{path}: cannot be read: {why(fault)}") from fault
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise InputError(f"{path}: not a result of bpc eval: give the file that bpc eval --output wrote") from fault
    model = artifact.metadata["model"]["id"]
    these = artifact.metadata["algorithm"], artifact.metadata["payload_sha256"]
    if made_with != these or result["model"] != model:
        raise InputError(
            f"{path}: was made without these projections or with another model than {model}: "
            "run bpc eval with this artifact"
        )
    return result


def _settings(found: Any) -> dict[str, Any]:
    """The settings, with those checked that are shown in words."""
    settings: dict[str, Any] = _of(found, dict)
    _of(settings["prompts"], int), _of(settings["min_tokens"], int)
    for layer in _of(settings["dense_layers"], list):
        _of(layer, int)
    _of(settings["raw"], bool), _of(settings.get("equal_shares", True), bool)
    return settings


def _row(row: Any) -> dict[str, Any]:
    method = method_of(_of(row["method"], str))
    task = _of(row["task"], str)
    ours = task in (*TASKS, TEXT)
    checked = {
        "method": row["method"],
        "task": task,
        "tokens": _of(row["tokens"], *([int] if ours else [int, type(None)])),
        "budget": _budget(row["budget"], method.takes_budget),
    }
    if "metrics" in row:  # of lm_eval
        if ours:
            raise ValueError(task)
        metrics = {name: value for name, value in _of(row["metrics"], dict).items() if isinstance(value, int | float)}
        return checked | {
            "prompts": _of(row["prompts"], int),
            "metrics": {n: _of(v, int, float) for n, v in metrics.items()},
        }
    checked["read"] = _of(row.get("read"), int, float, type(None))
    names = ["score"] if task in TASKS else [name for name in ("score", *FIGURES) if row.get(name) is not None]
    return checked | {
        name: {side: _of(row[name][side], int, float) for side in ("value", "low", "high")} for name in names
    }


def _budget(value: Any, needed: bool) -> float | int | None:
    """A share in (0, 1] or a number of tokens; None where none is needed."""
    budget: float | int | None = _of(value, int, float, *([] if needed else [type(None)]))
    if budget is not None and (budget <= 0 or (isinstance(budget, float) and budget > 1)):
        raise ValueError(budget)
    return budget


def _of(value: Any, *kinds: type) -> Any:
    """The value, if it has one of these types and, as a number, a size that figures have."""
    if type(value) not in kinds or (isinstance(value, int | float) and not -MOST <= value <= MOST):
        raise TypeError(type(value))
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
