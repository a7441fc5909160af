"""The tables of docs/demo-results.md, from the results of evaluation.py."""

from typing import Any

from markdown_table import Results, filled, link, percent, table

from bpc_calib.evaluation.methods import FIGURES, METHODS

__all__ = ["evaluation", "evaluation_files", "evaluation_rows"]

Row = dict[str, Any]


def evaluation_files(results: Results) -> str:
    """The files and the commands that made them."""
    return "\n".join(f"- {link(name)}: `{results[name]['command']}`" for name in _names(results))


def evaluation(results: Results) -> str:
    """A section for each length and budget: right answers, then what is kept of full attention on text."""
    rows = evaluation_rows(results)
    parts = []
    for tokens, budget in dict.fromkeys((row["tokens"], row["budget"]) for row in rows if row["budget"]):
        own = [row for row in rows if row["tokens"] == tokens and row["budget"] in (budget, None)]
        k = int(round(budget * tokens, 6))
        parts += [f"## {tokens:,} tokens, {100 * budget:g} % ({k} tokens)", *_answers(own), *_text(own)]
    return "\n\n".join(parts)


def evaluation_rows(results: Results) -> list[Row]:
    """The rows of all files; where two files have the same row, the one of the later file."""
    keys = ("task", "tokens", "method", "budget")
    found = {tuple(row[key] for key in keys): row for name in _names(results) for row in results[name]["rows"]}
    methods = list(METHODS)
    return sorted(found.values(), key=lambda row: (row["tokens"], methods.index(row["method"]), -(row["budget"] or 1)))


def _names(results: Results) -> list[str]:
    return sorted(name for name in results if name.startswith("evaluation_"))


def _answers(rows: list[Row]) -> list[str]:
    """Right answers in %, one line per method; empty without any."""
    rows = [row for row in rows if "score" in row]
    if not rows:
        return []
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        found = {row["task"]: row for row in rows if row["method"] == method}
        counts = " to ".join(map(str, sorted({row["prompts"] for row in found.values()})))
        scores = [_interval(found[task]["score"]) if task in found else "" for task in tasks]
        lines.append([METHODS[method].label, _read(next(iter(found.values()))), counts, *scores])
    return [table(["right answers, %", "KV read", "prompts", *tasks], lines)]


def _text(rows: list[Row]) -> list[str]:
    """What is kept of full attention on text, one line per method; empty without any."""
    rows = [row for row in rows if row["task"] == "text"]
    if not rows:
        return []
    lines = []
    for row in rows:
        figures = [_figure(row[key]) if key in row else "" for key in FIGURES]
        lines.append([METHODS[row["method"]].label, _read(row), *figures])
    return [filled(["text", "KV read", *FIGURES.values()], lines)]


def _read(row: Row) -> str:
    return f"{percent(row['read'])} %"


def _interval(figure: dict[str, float]) -> str:
    return f"{percent(figure['value'])} ({percent(figure['low'], 0)} to {percent(figure['high'], 0)})"


def _figure(figure: dict[str, float]) -> str:
    return f"{figure['value']:.3f} ± {(figure['high'] - figure['low']) / 2:.3f}"
