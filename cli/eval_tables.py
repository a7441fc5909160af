"""The result of `bpc eval` as tables."""

from typing import Any

from bpc_calib.evaluation.methods import FIGURES, METHODS, method_of
from bpc_calib.method.defaults import budget_text
from bpc_cli.console import TextTable, print_table, printable

# By method and column: the share of the KV bytes that the method read, and a figure as text.
Cells = dict[tuple[str, str], tuple[float | None, str]]


def print_evaluation(result: dict[str, Any]) -> None:
    """Print the tables of `evaluation_tables`, and in which setting the figures were measured."""
    from rich.table import Table

    for found in evaluation_tables(result["rows"], result["model"]):
        table = Table(pad_edge=False)  # all figures fit into 80 columns
        table.add_column(found.columns[0], no_wrap=True)
        for name in found.columns[1:]:
            table.add_column(printable(name), justify="right")
        for row in found.rows:
            table.add_row(*row)
        print_table(printable(found.title), table)
    settings = result["settings"]
    dense = ", ".join(map(str, settings["dense_layers"])) or "none"
    preset = f"Preset {settings['preset']}. " if settings.get("preset") else ""  # older results have none
    least = settings["min_tokens"]
    minimum = f"At least {least:,} tokens are attended" if least > 1 else "No minimum of tokens"
    print(f"{preset}Dense layers: {dense}. {minimum}.")
    if not settings.get("equal_shares", True):  # older results have no shares by head
        shown = {row["method"] for row in result["rows"]}
        if names := [method.label for name, method in METHODS.items() if method.by_need and name in shown]:
            listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            whose = f"{listed} share{'s' * (len(names) == 1)} the budget by what each KV head needs"
            print(f"{whose}; with the others each head attends to the mean.")
    if (learned := result.get("learned")) and learned["seconds"]:
        spent = ", ".join(
            f"{method_of(name).label} in {seconds:,.0f} s" for name, seconds in learned["seconds"].items()
        )
        print(f"Learned beforehand, from {learned['texts']} texts of {learned['tokens']:,} tokens: {spent}.")


def evaluation_tables(rows: list[dict[str, Any]], model: str) -> list[TextTable]:
    """Two tables for every length and budget: right answers, and what is kept of full attention on plain text."""
    tables = _harness_tables([row for row in rows if "metrics" in row], model)
    rows = [row for row in rows if "metrics" not in row]
    groups = dict.fromkeys((row["tokens"], row["budget"]) for row in rows if row["budget"] is not None)
    for tokens, budget in groups or {(row["tokens"], None): None for row in rows}:
        own = [row for row in rows if row["tokens"] == tokens and row["budget"] in (budget, None)]
        title = f"{model}, {_of_tokens(budget, tokens)}"
        cells: Cells = {
            (row["method"], row["task"]): (row.get("read"), _percent(row["score"])) for row in own if "score" in row
        }
        if cells:
            tasks = list(dict.fromkeys(task for _, task in cells))
            tables.append(_figures(f"{title}: right answers in %, and 95 % interval", cells, tasks))
        cells = {(row["method"], key): (row["read"], _mean(row[key])) for row in own for key in FIGURES if key in row}
        if cells:
            # Recall says least: the table would not fit into 80 columns with it.
            keys = [key for key in FIGURES if key != "recall" and any(key in row for row in own)]
            tables.append(_figures(f"{title}: text compared with full attention, and 95 % interval", cells, keys))
    return tables


def _harness_tables(rows: list[dict[str, Any]], model: str) -> list[TextTable]:
    """The metrics of lm_eval, with its own names: one line per method and budget."""
    tables = []
    for task, tokens in dict.fromkeys((row["task"], row["tokens"]) for row in rows):
        own = [row for row in rows if (row["task"], row["tokens"]) == (task, tokens)]
        names = list(dict.fromkeys(name for row in own for name in row["metrics"] if "," in name))
        lines = []
        for row in own:
            budget = "" if row["budget"] is None else _of_tokens(row["budget"], tokens)
            cells = [f"{row['metrics'][name]:.4g}" if name in row["metrics"] else "" for name in names]
            lines.append((method_of(row["method"]).label, budget, *cells))
        length = "" if tokens is None else f", {tokens:,} tokens"
        title = f"{model}: {task}{length}, {own[0]['prompts']} documents"
        tables.append(TextTable(title, ("method", "budget", *names), lines))
    return tables


def _figures(title: str, cells: Cells, columns: list[str]) -> TextTable:
    lines = []
    for method in dict.fromkeys(method for method, _ in cells):
        found = {column: cells[method, column] for column in columns if (method, column) in cells}
        read, _ = next(iter(found.values()))
        shown = [found[column][1] if column in found else "" for column in columns]
        lines.append((method_of(method).label, "" if read is None else f"{read:.1%}", *shown))
    return TextTable(title, ("method", "KV read", *(FIGURES.get(name, name) for name in columns)), lines)


def _of_tokens(budget: float | int | None, tokens: int | None) -> str:
    if budget is None:
        return f"{tokens:,} tokens" if tokens else "all tokens"
    if tokens is None:
        return f"{budget_text(budget)} of the context"
    return f"{budget if isinstance(budget, int) else budget_text(budget)} of {tokens:,} tokens"


def _percent(figure: dict[str, Any]) -> str:
    value, low, high = (100 * figure[side] for side in ("value", "low", "high"))
    return f"{value:.0f} ({low:.0f}-{high:.0f})"


def _mean(figure: dict[str, Any]) -> str:
    return f"{figure['value']:.3f} ±{(figure['high'] - figure['low']) / 2:.3f}"
