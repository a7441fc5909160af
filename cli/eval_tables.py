"""The result of `bpc eval` as tables."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bpc_calib.evaluation.methods import METHODS
from bpc_cli.console import print_table, printable
from bpc_cli.quantities import budget_text

__all__ = ["FIGURES", "print_evaluation"]

FIGURES = {
    "loss_difference": "loss", "kl": "KL", "recall": "recall", "mass": "mass", "best_kept": "best kept",
    "cosine": "cosine",
}  # fmt: skip


class _Cell(NamedTuple):
    """A figure of a method, and the share of the KV bytes that the method read."""

    method: str
    column: str
    read: float | None
    figure: dict[str, Any]


def print_evaluation(rows: list[dict[str, Any]], model: str) -> None:
    """Two tables for every length and budget: right answers, and what is kept of full attention on plain text."""
    _print_harness([row for row in rows if "metrics" in row], model)
    rows = [row for row in rows if "metrics" not in row]
    groups = dict.fromkeys((row["tokens"], row["budget"]) for row in rows if row["budget"] is not None)
    for tokens, budget in groups or {(row["tokens"], None): None for row in rows}:
        own = [row for row in rows if row["tokens"] == tokens and row["budget"] in (budget, None)]
        title = f"{printable(model)}, {_of_tokens(budget, tokens)}"
        answers = {row["task"]: _percent for row in own if "score" in row}
        if answers:
            cells = [_Cell(row["method"], row["task"], row.get("read"), row["score"]) for row in own if "score" in row]
            _print_figures(f"{title}: right answers in %, and 95 % interval", cells, answers)
        figures = {key: _mean for key in FIGURES if any(key in row for row in own)}
        if figures:
            cells = [_Cell(row["method"], key, row["read"], row[key]) for row in own for key in figures if key in row]
            _print_figures(f"{title}: text compared with full attention, and 95 % interval", cells, figures)


def _print_harness(rows: list[dict[str, Any]], model: str) -> None:
    """The metrics of lm_eval, with its own names: one line per method and budget."""
    from rich.table import Table

    for task, tokens in dict.fromkeys((row["task"], row["tokens"]) for row in rows):
        own = [row for row in rows if (row["task"], row["tokens"]) == (task, tokens)]
        names = list(dict.fromkeys(name for row in own for name in row["metrics"] if "," in name))
        table = Table("method", "budget", *map(printable, names))
        for row in own:
            budget = "" if row["budget"] is None else _of_tokens(row["budget"], tokens)
            cells = [f"{row['metrics'][name]:.4g}" if name in row["metrics"] else "" for name in names]
            table.add_row(METHODS[row["method"]].label, budget, *cells)
        length = "" if tokens is None else f", {tokens:,} tokens"
        print_table(f"{printable(model)}: {printable(task)}{length}, {own[0]['prompts']} documents", table)


def _print_figures(title: str, cells: list[_Cell], columns: Mapping[str, Callable[[dict[str, Any]], str]]) -> None:
    from rich.table import Table

    table = Table(pad_edge=False)  # all figures fit into 80 columns
    table.add_column("method", no_wrap=True)
    for name in ("KV read", *(FIGURES.get(name, name) for name in columns)):
        table.add_column(printable(name), justify="right")
    for method in dict.fromkeys(cell.method for cell in cells):
        found = {cell.column: cell for cell in cells if cell.method == method}
        read = next(iter(found.values())).read
        shown = [as_text(found[name].figure) if name in found else "" for name, as_text in columns.items()]
        table.add_row(METHODS[method].label, "" if read is None else f"{read:.1%}", *shown)
    print_table(title, table)


def _of_tokens(budget: float | int | None, tokens: int | None) -> str:
    if budget is None:
        return f"{tokens:,} tokens" if tokens else "all tokens"
    if tokens is None:
        return f"{budget_text(budget)} of the context"
    return (
        f"{budget} of {tokens:,} tokens" if isinstance(budget, int) else f"{budget_text(budget)} of {tokens:,} tokens"
    )


def _percent(figure: dict[str, Any]) -> str:
    value, low, high = (100 * figure[side] for side in ("value", "low", "high"))
    return f"{value:.0f} ({low:.0f}-{high:.0f})"


def _mean(figure: dict[str, Any]) -> str:
    return f"{figure['value']:.3f} ±{(figure['high'] - figure['low']) / 2:.3f}"
