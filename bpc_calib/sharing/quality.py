"""The measured quality on a model card: the result file of `bpc eval`, checked, as tables."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import METHODS
from bpc_calib.evaluation.saved_result import read_result
from bpc_calib.evaluation.tasks import TASKS, TEXT
from bpc_calib.method.budget_words import budget_text
from bpc_calib.sharing.markdown import code, table

__all__ = ["publishable_result", "quality"]

_TASK = re.compile(r"[\w.:-]+")  # a name, and never a path
_METRIC = re.compile(r"[\w.-]+,[\w.-]+")  # lm_eval's: the metric and its filter
FIGURES = {"loss_difference": "loss above full attention's, nats", "kl": "KL", "recall": "recall", "mass": "mass"}


def publishable_result(path: Path, artifact: ProjectionArtifact) -> dict[str, Any]:
    """Read the file that `bpc eval --output` wrote, for a card.

    Raises:
        InputError: it is no such file, measured another model or other projections, or names a task by its path.
    """
    found = read_result(path, artifact)
    for row in found["rows"]:
        if not _TASK.fullmatch(row["task"]):
            raise InputError(f"{path}: {row['task'][:80]} is a local path: run bpc eval without this task")
    return found


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
    return "" if row["budget"] is None else budget_text(row["budget"])


def _answer(row: Mapping[str, Any], task: str) -> str:
    if row["task"] != task:
        return ""
    value, low, high = (100 * row["score"][side] for side in ("value", "low", "high"))
    return f"{value:.0f} % ({low:.0f} to {high:.0f})"


def _figure(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    return f"{row[name]['value']:.3f} ({row[name]['low']:.3f} to {row[name]['high']:.3f})"
