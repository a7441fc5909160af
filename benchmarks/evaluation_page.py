"""Writes docs/demo-results.md and its pictures from the results of evaluation.py.

python benchmarks/evaluation_page.py benchmarks/results/evaluation_*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from bpc_calib.evaluation import METHODS, pictures
from bpc_cli.eval import FIGURES

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    results = [(Path(name), json.loads(Path(name).read_text())) for name in sys.argv[1:]]
    # Where two files have the same row, the later file's counts.
    keys = ("task", "tokens", "method", "budget")
    rows = list({tuple(row[key] for key in keys): row for _, result in results for row in result["rows"]}.values())
    rows.sort(key=lambda row: (row["tokens"], list(METHODS).index(row["method"]), -(row["budget"] or 1)))
    lines = [
        "# The bundled model's results",
        "",
        "Written by `benchmarks/evaluation_page.py` from these files; each holds its command, machine, versions and",
        "commit:",
        "",
    ]
    for path, result in results:
        lines.append(f"- [{path.name}](../benchmarks/results/{path.name}): `{result['command']}`")
    lines += [
        "",
        "The setting is the hard one: no dense layer, nothing attended beyond the budget, questions and answers",
        "decoded token by token. The projections come from made text other than the prompts':",
        "`bpc calibrate -m demo --samples 180 --sequence-length 2048 -o demo.safetensors`.",
        "[What the figures mean](evaluating.md#figures). 95 % intervals in brackets.",
        "",
        "`evaluation_2048_score_aware.json` and `evaluation_text_2048.json` are of the defaults of today. The others",
        "are older: there BPC, exact top-k, Quest and signs rank by the largest score of a group and always attend to",
        "the newest token, and BPC takes 8 steps a bit without metric, least squares and centring, and a safeguard of",
        "0.1; the other methods are as they were. Today's BPC at 8,192 tokens is in [projections](projections.md).",
        "",
    ]
    for tokens, budget in dict.fromkeys((row["tokens"], row["budget"]) for row in rows if row["budget"]):
        own = [row for row in rows if row["tokens"] == tokens and row["budget"] in (budget, None)]
        k = int(round(budget * tokens, 6))
        lines += [f"## {tokens:,} tokens, {100 * budget:g} % ({k} tokens)", ""]
        lines += _answers(own) + _text(own)
    for name, alt in _draw(rows).items():
        lines += [f"![{alt}](pictures/{name})", ""]
    (DOCS / "demo-results.md").write_text("\n".join(lines).rstrip() + "\n")
    print("Wrote docs/demo-results.md")


def _answers(rows: list[dict[str, Any]]) -> list[str]:
    """Right answers in %, a line a method."""
    rows = [row for row in rows if "score" in row]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not rows:
        return []
    lines = [f"| right answers, % | KV read | prompts | {' | '.join(tasks)} |", "|---|---|---|" + "---|" * len(tasks)]
    for method in dict.fromkeys(row["method"] for row in rows):
        found = {row["task"]: row for row in rows if row["method"] == method}
        cells = [_percent(found[task]["score"]) if task in found else "" for task in tasks]
        counts = " to ".join(map(str, sorted({row["prompts"] for row in found.values()})))
        lines.append(f"| {METHODS[method].label} | {_read(found)} | {counts} | {' | '.join(cells)} |")
    return [*lines, ""]


def _text(rows: list[dict[str, Any]]) -> list[str]:
    """What is kept of full attention, a line a method."""
    rows = [row for row in rows if row["task"] == "text"]
    if not rows:
        return []
    lines = [f"| text | KV read | {' | '.join(FIGURES.values())} |", "|---|---|" + "---|" * len(FIGURES)]
    for row in rows:
        cells = [_figure(row[key]) if key in row else "" for key in FIGURES]
        lines.append(f"| {METHODS[row['method']].label} | {_read({'text': row})} | {' | '.join(cells)} |")
    return [*lines, ""]


def _read(found: dict[str, dict[str, Any]]) -> str:
    return f"{next(iter(found.values()))['read']:.1%}"


def _percent(figure: dict[str, float]) -> str:
    value, low, high = (100 * figure[key] for key in ("value", "low", "high"))
    return f"{value:.1f} ({low:.0f} to {high:.0f})"


def _figure(figure: dict[str, float]) -> str:
    return f"{figure['value']:.3f} ± {(figure['high'] - figure['low']) / 2:.3f}"


def _draw(rows: list[dict[str, Any]]) -> dict[str, str]:
    written = pictures.draw(rows, DOCS / "pictures", overwrite=True)
    titles = {
        "recall.png": "Recall by layer and head",
        "needles.png": "Needles by depth and length",
        "budgets.png": "Answers and mass by budget",
    }
    return {path.name: titles[path.name] for path in written}


if __name__ == "__main__":
    main()
