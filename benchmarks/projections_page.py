"""Writes docs/projections-results.md from the results of projections.py.

python benchmarks/projections_page.py benchmarks/results/projections_*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "projections-results.md"
METRICS = {"best_kept": "best kept", "mass": "mass", "recall": "recall", "cosine": "cosine"}


def main() -> None:
    lines = [
        "# The study of projections: all tables",
        "",
        "Written by `benchmarks/projections_page.py`; what follows from them is in [projections](projections.md).",
        "Needles: right answers in % at each budget, in the hard setting (no dense layer, nothing attended beyond the",
        "budget, question and answer decoded token by token). The other columns are at 2 % on text, means over layers",
        "and heads, except where another budget is named. [What the figures mean](evaluating.md#figures).",
        "",
    ]
    for name in sys.argv[1:]:
        result = json.loads(Path(name).read_text())
        lines += _section(Path(name), result)
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    print("Wrote docs/projections-results.md")


def _section(path: Path, result: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    link = f"[{path.name}](../benchmarks/results/{path.name})"
    lines = [
        f"## {path.stem.removeprefix('projections_').replace('_', ' ')}",
        "",
        f"{link}: `{result['command']}`",
        "",
        f"{settings['length']:,} tokens, {settings['prompts']} prompts, {settings['texts']} texts.",
        "",
    ]
    rows: dict[str, dict[float, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["budget"] is None:
            if "needle" in row:
                lines += [f"Full attention answers {_percent(row['needle'])} %.", ""]
        else:
            rows.setdefault(row["variant"], {})[row["budget"]] = row
    for part in dict.fromkeys(name.split(":")[0] for name in rows):
        own = {name.split(": ", 1)[1]: each for name, each in rows.items() if name.startswith(f"{part}:")}
        budgets = sorted({budget for each in own.values() for budget in each})
        shown = 0.02 if 0.02 in budgets else budgets[-1]
        asked = any("needle" in row for each in own.values() for row in each.values())
        kept = {key: title for key, title in METRICS.items() if any(key in each[shown] for each in own.values())}
        heads = [part, *(f"{100 * budget:g} %" for budget in budgets if asked), *kept.values(), "KV read"]
        if shown != 0.02:
            heads[0] = f"{part} (others at {100 * shown:g} %)"
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for name, each in own.items():
            cells = [_percent(each[budget]["needle"]) for budget in budgets if asked]
            cells += [f"{each[shown][key]['value']:.3f}" if key in each[shown] else "" for key in kept]
            cells.append(f"{each[shown]['read']:.1%}" if "read" in each[shown] else "")
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _percent(figure: dict[str, float]) -> str:
    return f"{100 * figure['value']:.1f}"


if __name__ == "__main__":
    main()
