"""Plots of the results of `evaluate` (matplotlib, extra `plots`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bpc_artifacts.replacing import PICTURE, check_matplotlib, replacing, try_replacing
from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import METHODS
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import budget_text

__all__ = ["check", "draw"]

NAMES = {"recall": "recall.png", "needle": "needles.png", "budget": "budgets.png"}


def check(folder: Path, overwrite: bool) -> None:
    """Raise a `BPCError` if `draw` could not write its files."""
    check_matplotlib("pictures need")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: not a folder: name a folder for the pictures")
    if not folder.is_dir() and not folder.parent.is_dir():
        raise InputError(f"{folder}: there is no folder {folder.parent}: make it first")
    for name in NAMES.values() if folder.is_dir() else ():
        try_replacing(folder / name, 1 << 20, overwrite, PICTURE)


def draw(rows: list[dict[str, Any]], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Draw all plots for which the rows have data; return the written files.

    `recall.png` maps recall by layer and KV head, `needles.png` maps needle accuracy by depth and length, both at the
    smallest budget. `budgets.png` shows the result of every task by budget.
    """
    import matplotlib

    check(folder, overwrite)
    matplotlib.use("agg")
    folder.mkdir(exist_ok=True)
    written = []
    for name, figure in _figures(rows):
        with replacing(folder / name, overwrite, PICTURE) as temporary:
            figure.savefig(temporary, format="png", dpi=150)
        written.append(folder / name)
    return written


def _figures(rows: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    rows = [row for row in rows if row["tokens"] is not None]  # rows of lm_eval have other metrics
    lengths = sorted({row["tokens"] for row in rows})
    budget_set = {row["budget"] for row in rows if row["budget"] is not None}
    budgets = sorted(budget_set, key=lambda budget: attended(lengths[-1], budget, 1))
    if not budgets:
        return
    least = budgets[0]
    maps = [row for row in rows if row["budget"] == least and "recall_by_head" in row and row["tokens"] == lengths[-1]]
    if maps:
        title = f"Recall of the true top-k by layer and KV head, {budget_text(least)} of {lengths[-1]:,} tokens"
        values = [row["recall_by_head"] for row in maps]
        yield NAMES["recall"], _maps(maps, values, "KV head", "layer", title, [row["layers"] for row in maps])
    grids = [row for row in rows if row["budget"] in (least, None) and "depths" in row]
    names = [name for name in METHODS if any(row["method"] == name for row in grids)]
    if grids:
        heads, values, marks = [], [], []
        for name in names:
            own = sorted((row for row in grids if row["method"] == name), key=lambda row: row["tokens"])
            heads.append(own[0])
            values.append([[depth["value"] for depth in row["depths"]] for row in own])
            marks.append([f"{row['tokens']:,}" for row in own])
        title = f"Needles found by depth (0 is the beginning) and length, {budget_text(least)} of the tokens"
        yield NAMES["needle"], _maps(heads, values, "depth, tenths", "tokens", title, marks)
    if len(budgets) > 1:
        yield NAMES["budget"], _curves(rows, budgets)


def _maps(rows: list[dict[str, Any]], values: list[Any], across: str, down: str, title: str, marks: list[Any]) -> Any:
    """Draw one heat map per method, all on the scale from 0 to 1."""
    from matplotlib import pyplot

    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(3 * columns + 1, 2.2 * lines + 0.8), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for axis, row, value, mark in zip(axes.flat, rows, values, marks, strict=False):
        picture = axis.imshow(value, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axis.set_title(METHODS[row["method"]].label, fontsize="medium")
        axis.set(xlabel=across, ylabel=down)
        axis.set_yticks(range(len(value)), mark)
        axis.set_xticks(range(len(value[0])))
    figure.colorbar(picture, ax=axes)
    figure.suptitle(title)
    return figure


def _curves(rows: list[dict[str, Any]], budgets: list[float]) -> Any:
    """Draw one panel per task and length, with one line and its interval per method."""
    from matplotlib import pyplot

    panels = sorted({(row["task"], row["tokens"]) for row in rows})
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.5 * columns + 2, 3.2 * lines), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    names = [name for name in METHODS if any(row["method"] == name for row in rows)]
    colors = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    for axis, (task, tokens) in zip(axes.flat, panels, strict=False):
        key = "mass" if task == "text" else "score"
        for name in names:
            own = [row for row in rows if (row["task"], row["tokens"], row["method"]) == (task, tokens, name)]
            own = sorted((row for row in own if key in row), key=lambda row: row["budget"] or 0)
            if not METHODS[name].takes_budget:
                for row in own:
                    axis.axhline(row[key]["value"], color=colors[name], linestyle="--", label=METHODS[name].label)
                continue
            middle = [row[key]["value"] for row in own]
            around = [
                [row[key]["value"] - row[key]["low"] for row in own],
                [row[key]["high"] - row[key]["value"] for row in own],
            ]
            if own:
                places = [budgets.index(row["budget"]) for row in own]
                axis.errorbar(
                    places,
                    middle,
                    around,
                    marker="o",
                    capsize=2,
                    color=colors[name],
                    label=METHODS[name].label,
                )
        axis.set_title(f"{task}, {tokens:,} tokens", fontsize="medium")
        axis.set(xlabel="budget", ylabel="attention mass" if key == "mass" else "correct answers", ylim=(-0.03, 1.03))
        axis.set_xticks(range(len(budgets)), [budget_text(budget) for budget in budgets])
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes.flat), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    return figure
