"""The tables of docs/projections-results.md: everything that projections.py measured."""

from typing import Any

from markdown_table import Results, link, percent, table

__all__ = ["study"]

METRICS = {"best_kept": "best kept", "mass": "mass", "recall": "recall", "cosine": "cosine"}
SHOWN = 0.02  # the budget of the columns beside the right answers

Rows = dict[str, dict[float, dict[str, Any]]]  # by variant and budget


def study(results: Results) -> str:
    """A section for each file, with a table for each part of the study."""
    return "\n\n".join(_section(name, results[name]) for name in sorted(results) if name.startswith("projections_"))


def _section(name: str, result: dict[str, Any]) -> str:
    settings = result["settings"]
    parts = [
        f"## {name.removeprefix('projections_').replace('_', ' ')}",
        f"{link(name)}: `{result['command']}`",
        f"{settings['length']:,} tokens, {settings['prompts']} prompts, {settings['texts']} texts.",
    ]
    rows: Rows = {}
    for row in result["rows"]:
        if row["budget"] is not None:
            rows.setdefault(row["variant"], {})[row["budget"]] = row
        elif "needle" in row:
            parts.append(f"Full attention answers {percent(row['needle']['value'])} %.")
    for part in dict.fromkeys(variant.split(":")[0] for variant in rows):
        own = {variant.split(": ", 1)[1]: row for variant, row in rows.items() if variant.startswith(f"{part}:")}
        parts.append(_part(part, own))
    return "\n\n".join(parts)


def _part(part: str, rows: Rows) -> str:
    """One line per variant: right answers at each budget, then the other figures at one of them."""
    budgets = sorted({budget for each in rows.values() for budget in each})
    shown = SHOWN if SHOWN in budgets else budgets[-1]
    asked = budgets if any("needle" in row for each in rows.values() for row in each.values()) else []
    kept = {key: title for key, title in METRICS.items() if any(key in each[shown] for each in rows.values())}
    lines = []
    for name, each in rows.items():
        row = each[shown]
        cells = [percent(each[budget]["needle"]["value"]) for budget in asked]
        cells += [f"{row[key]['value']:.3f}" if key in row else "" for key in kept]
        lines.append([name, *cells, f"{percent(row['read'])} %" if "read" in row else ""])
    title = part if shown == SHOWN else f"{part} (KV read at {100 * shown:g} %)"
    heads = [title, *(f"answers at {100 * budget:g} %" for budget in asked), *kept.values(), "KV read"]
    if not any(line[-1] for line in lines):
        heads, lines = heads[:-1], [line[:-1] for line in lines]
    return table(heads, lines)
