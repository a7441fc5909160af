"""The results of `gpu_suite.py`: merged with those of an earlier run, and shown."""

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["merged", "show", "status"]

COLUMNS = (
    "tokens what exact differing of unit median spread eager floor times_floor tokens_per_second passed failed errors "
    "skipped note"
).split()


def merged(path: Path | None, result: dict[str, Any], selected: list[str]) -> dict[str, Any]:
    """`result` with the parts that are not selected as the file has them, if it measured the same code and GPU."""
    try:
        old = json.loads(path.read_text()) if path else None
        if old is None or _measured(old) != _measured(result):
            return result
        kept = {name: part for name, part in old["parts"].items() if name not in selected and name in result["parts"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return result
    return result | {"parts": result["parts"] | kept}


def _measured(result: dict[str, Any]) -> list[Any]:
    """What must be the same: the results file itself may make a checkout dirty."""
    machine = result["machine"]
    commit = (machine["commit"] or "").removesuffix("-dirty")
    return [commit, machine["gpu"], machine["versions"], result["sources"], result["tiny"]]


def status(rows: list[dict[str, Any]], fault: str | None, *, stopped: bool) -> str:
    """One word for a part: failed, stopped, measured or not measured."""
    if any(row.get("exact") is False or row.get("failed") or row.get("errors") for row in rows):
        return "failed"
    if stopped:
        return "stopped" if rows else "not measured"
    if fault:
        return "failed"
    return "measured" if rows else "not measured"


def show(title: str, made: dict[str, Any]) -> None:
    """Print the part as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(160, Console().width))
    rows = made["rows"]
    table = Table(title=f"{title}: {made['status']}, {made['seconds']} s", title_justify="left")
    columns = [each for each in COLUMNS if any(row.get(each) is not None for row in rows)]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column in ("what", "note") else "right")
    for row in rows:
        table.add_row(*(cell(row, column) for column in columns))
    console.print(table, markup=False)
    if "fault" in made:
        console.print(made["fault"], markup=False)
    sys.stdout.flush()


def cell(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        return "not measured" if column == "median" and "note" in row else ""
    if isinstance(value, list):
        return " to ".join(f"{each:,}" for each in value)
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
