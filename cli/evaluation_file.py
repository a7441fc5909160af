"""The result of `bpc eval --output`, read for the artifact that it was made with."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bpc_calib.evaluation.methods import METHODS
from bpc_cli.console import fail
from bpc_cli.eval_tables import FIGURES

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["read_evaluation"]

MOST_BYTES = 64 << 20  # far above every result


def read_evaluation(path: Path, artifact: "ProjectionArtifact") -> dict[str, Any]:
    """The `model`, `settings` and `rows` of a result; each row has only what the tables show, checked.

    Ends the command with one line if the file is no such result, or if it was made with other projections.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            fail(f"{path}: larger than {MOST_BYTES >> 20} MiB, so not a result of bpc eval")
        found = json.loads(path.read_bytes(), parse_constant=_no_constant)
    except OSError as fault:
        fail(f"{path}: cannot be read: {fault.strerror or fault}")
    except (ValueError, RecursionError):
        fail(f"{path}: not JSON: give the file that bpc eval --output wrote")
    try:
        result = {
            "model": _of(found["model"], str),
            "settings": _of(found["settings"], dict),
            "rows": [_row(row) for row in _of(found["rows"], list)],
        }
        made_with = found["artifact"]
    except (KeyError, TypeError, ValueError) as fault:
        fail(f"{path}: not a result of bpc eval ({type(fault).__name__}: {fault}): give the file that --output wrote")
    algorithm, model = dict(artifact.metadata["algorithm"]), artifact.metadata["model"]["id"]
    if made_with is None:
        fail(f"{path}: was made without projections: run bpc eval with --artifact")
    if made_with != algorithm or result["model"] != model:
        fail(f"{path}: was made with other projections or another model than {model}: run bpc eval with this artifact")
    return result


def _row(row: Any) -> dict[str, Any]:
    """The checked entries of one row that the tables show."""
    row = _of(row, dict)
    if row["method"] not in METHODS:
        raise ValueError(f"unknown method {str(row['method'])[:40]!r}")
    checked: dict[str, Any] = {"method": row["method"], "task": _of(row["task"], str)}
    checked |= {"tokens": _of(row["tokens"], int, type(None)), "budget": _of(row["budget"], int, float, type(None))}
    if "metrics" in row:
        metrics = _of(row["metrics"], dict)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        return checked | {"prompts": _of(row["prompts"], int), "metrics": numbers}
    checked["read"] = _of(row.get("read"), int, float, type(None))
    return checked | {key: _figure(row[key]) for key in ("score", *FIGURES) if row.get(key) is not None}


def _figure(found: Any) -> dict[str, float]:
    table: Mapping[str, Any] = _of(found, dict)
    return {side: _of(table[side], int, float) for side in ("value", "low", "high")}


def _of(value: Any, *kinds: type) -> Any:
    """The value, if it has one of these types and is finite."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"expected {kinds[0].__name__}, found {str(value)[:40]!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
