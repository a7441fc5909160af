"""The measured quality on a model card: the result file of `bpc eval`, checked, as tables."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import METHODS
from bpc_calib.evaluation.tasks import TASKS, TEXT
from bpc_calib.sharing.markdown import code, table

__all__ = ["quality", "read_evaluation"]

MOST_BYTES = 64 << 20  # far above every result
_METRIC = re.compile(r"[\w.-]+,[\w.-]+")  # lm_eval's: the metric and its filter
FIGURES = {"loss_difference": "loss above full attention's, nats", "kl": "KL", "recall": "recall", "mass": "mass"}


def read_evaluation(path: Path, artifact: ProjectionArtifact) -> dict[str, Any]:
    """Read the file that `bpc eval -o` wrote, and check all that a card shows of it.

    Raises:
        InputError: it is no such file, or it measured another model or other projections.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
        found = json.loads(path.read_bytes(), parse_constant=_no_constant)
        rows, settings, model, algorithm = (found[key] for key in ("rows", "settings", "model", "artifact"))
        for row in rows:
            _check_row(row)
        for key in ("prompts", "min_tokens"):
            _expect(settings[key], int)
        layers = settings["dense_layers"]
        _expect(layers, list)
        for layer in layers:
            _expect(layer, int)
        _expect(settings["raw"], bool)
    except OSError as fault:
        raise InputError(f"{path}: cannot be read: {fault.strerror or fault}") from fault
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise InputError(f"{path}: not a result of bpc eval: give the file that bpc eval -o wrote") from fault
    if model != artifact.metadata["model"]["id"] or algorithm != artifact.metadata["algorithm"]:
        raise InputError(
            f"{path}: measured another model or other projections than those of this artifact: "
            "run bpc eval with this artifact"
        )
    return {"rows": rows, "settings": settings}


def quality(evaluation: Mapping[str, Any]) -> str:
    """Return the tables of a checked evaluation: right answers, plain text, and tasks of lm_eval."""
    rows, settings = evaluation["rows"], evaluation["settings"]
    dense = ", ".join(map(str, settings["dense_layers"])) or "none"
    parts = [
        f"Measured by `bpc eval`: {settings['prompts']} prompts per task and length, dense layers {dense}, "
        f"tokens attended at least {settings['min_tokens']:,}{', no chat template' if settings['raw'] else ''}. "
        "In brackets: the 95 % interval."
    ]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    answers = [row for row in rows if row["task"] in tasks]
    if answers:
        parts += ["Right answers:", _grid(answers, {task: task for task in tasks}, _answer)]
    texts = [row for row in rows if row["task"] == TEXT]
    if texts:
        parts += ["Plain text, compared with full attention:", _grid(texts, FIGURES, _figure)]
    harness = [
        [code(row["task"]), _tokens(row), _budget(row), METHODS[row["method"]].label, code(name), f"{value:.4g}"]
        for row in rows
        if "metrics" in row
        for name, value in row["metrics"].items()
        if _METRIC.fullmatch(name)
    ]
    if harness:
        parts += ["Tasks of lm_eval:", table(["task", "tokens", "attended", "method", "metric", "value"], harness)]
    return "\n\n".join(parts)


def _grid(rows: list[dict[str, Any]], columns: Mapping[str, str], cell: Any) -> str:
    """Return one line per length, budget and method, with one column per task or figure."""
    groups = dict.fromkeys((row["tokens"], row["budget"], row["method"]) for row in rows)
    order = sorted(groups, key=lambda key: (key[0], _attended(*key[:2]), list(METHODS).index(key[2])))
    lines = []
    for key in order:
        own = [row for row in rows if (row["tokens"], row["budget"], row["method"]) == key]
        read = next((f"{100 * row['read']:.1f} %" for row in own if row.get("read") is not None), "")
        cells = [next((text for row in own if (text := cell(row, name))), "") for name in columns]
        lines.append([_tokens(own[0]), _budget(own[0]), METHODS[key[2]].label, read, *cells])
    return table(["tokens", "attended", "method", "KV bytes read", *columns.values()], lines)


def _attended(tokens: int, budget: float | int | None) -> float:
    """Return a number to sort by: full attention, which has no budget, comes first."""
    return -1 if budget is None else budget if isinstance(budget, int) else budget * tokens


def _tokens(row: Mapping[str, Any]) -> str:
    return "" if row["tokens"] is None else f"{row['tokens']:,}"


def _budget(row: Mapping[str, Any]) -> str:
    budget = row["budget"]
    if budget is None:
        return ""
    return f"{budget:,} tokens" if isinstance(budget, int) else f"{100 * budget:.3g} %"


def _answer(row: Mapping[str, Any], task: str) -> str:
    if row["task"] != task:
        return ""
    value, low, high = (100 * row["score"][side] for side in ("value", "low", "high"))
    return f"{value:.0f} % ({low:.0f} to {high:.0f})"


def _figure(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    return f"{row[name]['value']:.3f} ({row[name]['low']:.3f} to {row[name]['high']:.3f})"


def _check_row(row: Any) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` unless the card can show this row."""
    if row["method"] not in METHODS:
        raise ValueError(row["method"])
    if not re.fullmatch(r"[\w.:-]+", row["task"]):  # a name, and never a path
        raise ValueError(row["task"])
    _expect(row["tokens"], *((int,) if row["task"] in (*TASKS, TEXT) else (int, type(None))))
    _expect(row["budget"], int, float, type(None))
    _expect(row.get("read"), float, int, type(None))
    figures = [row["score"]] if row["task"] in TASKS else [row[name] for name in FIGURES if name in row]
    for figure in figures:
        for side in ("value", "low", "high"):
            _expect(figure[side], float, int)
    for name, value in row.get("metrics", {}).items():
        if _METRIC.fullmatch(name):
            _expect(value, float, int)


def _expect(value: Any, *kinds: type) -> None:
    if type(value) not in kinds or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
