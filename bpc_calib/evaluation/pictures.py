"""Plots of the results of `evaluate` (matplotlib, extra `plots`)."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bpc_artifacts.replacing import PICTURE, replacing, try_replacing
from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import in_order, method_of
from bpc_calib.extras import lacking
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import budget_text

__all__ = ["check", "draw"]

NAMES = {"recall": "recall.png", "needle": "needles.png", "budget": "budgets.png", "bytes": "bytes.png"}


def check(folder: Path, overwrite: bool) -> None:
    """Raise a `BPCError` if `draw` could not write its files."""
    if lacks := lacking("plots", "matplotlib"):
        raise InputError(f"pictures need {lacks}")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InputError(f"{folder}: not a folder: name a folder for the pictures")
    if not os.path.isdir(folder) and not os.path.isdir(folder.parent):
        raise InputError(f"{folder}: there is no folder {folder.parent}: make it first")
    for name in NAMES.values() if os.path.isdir(folder) else ():
        try_replacing(folder / name, 1 << 20, overwrite, PICTURE)
    if not os.path.isdir(folder):
        try_replacing(folder, 1 << 20, overwrite)  # so can the folder be made, whatever its name


def draw(rows: list[dict[str, Any]], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Draw all plots for which the rows have data; return the written files.

    `recall.png` maps recall by layer and KV head, `needles.png` maps needle accuracy by depth and length, both at the
    smallest budget. `budgets.png` shows the result of every task by budget, and `bytes.png` how far every method's
    predictions are from full attention's, by the bytes that it reads.
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
    if texts := [row for row in rows if row.get("kl") and row["method"] != "full"]:
        yield NAMES["bytes"], _by_bytes(texts)
    if not budgets:
        return
    least = budgets[0]
    maps = [
        (row["method"], row["recall_by_head"], row["layers"])
        for row in rows
        if row["budget"] == least and row["tokens"] == lengths[-1] and "recall_by_head" in row
    ]
    if maps:
        title = f"Recall of the true top-k by layer and KV head, {budget_text(least)} of {lengths[-1]:,} tokens"
        yield NAMES["recall"], _maps(maps, "KV head", "layer", title)
    grids = []
    for name in in_order(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name and row["budget"] in (least, None) and "depths" in row]
        own.sort(key=lambda row: row["tokens"])
        if own:
            values = [[depth["value"] for depth in row["depths"]] for row in own]
            grids.append((name, values, [f"{row['tokens']:,}" for row in own]))
    if grids:
        title = f"Needles found by depth (0 is the beginning) and length, {budget_text(least)} of the tokens"
        yield NAMES["needle"], _maps(grids, "depth, tenths", "tokens", title)
    if len(budgets) > 1:
        yield NAMES["budget"], _curves(rows, budgets)


def _grid(count: int, most: int, size: tuple[float, float], margin: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, at most so many in a row, each of a size in inches."""
    from matplotlib import pyplot

    columns = min(most, count)
    lines = -(-count // columns)
    width, height = size[0] * columns + margin[0], size[1] * lines + margin[1]
    figure, axes = pyplot.subplots(lines, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:count])


def _maps(maps: list[tuple[str, Any, Any]], across: str, down: str, title: str) -> Any:
    """Draw a heat map per method on the scale from 0 to 1, from its name, its rows of values and their labels."""
    figure, axes = _grid(len(maps), 4, (3, 2.2), (1, 0.8))
    for axis, (name, values, marks) in zip(axes, maps, strict=True):
        picture = axis.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axis.set_title(method_of(name).label, fontsize="medium")
        axis.set(xlabel=across, ylabel=down)
        axis.set_yticks(range(len(values)), marks)
        axis.set_xticks(range(len(values[0])))
    figure.colorbar(picture, ax=figure.axes)
    figure.suptitle(title)
    return figure


def _curves(rows: list[dict[str, Any]], budgets: list[float]) -> Any:
    """Draw one panel per task and length, with one line and its interval per method."""
    panels = sorted({(row["task"], row["tokens"]) for row in rows})
    figure, axes = _grid(len(panels), 3, (4.5, 3.2), (2, 0))
    colors = _colors(rows)
    for axis, (task, tokens) in zip(axes, panels, strict=True):
        key = "mass" if task == "text" else "score"
        for name in colors:
            own = [row for row in rows if (row["task"], row["tokens"], row["method"]) == (task, tokens, name)]
            own = sorted((row for row in own if key in row), key=lambda row: row["budget"] or 0)
            if not method_of(name).takes_budget:
                for row in own:
                    axis.axhline(row[key]["value"], color=colors[name], linestyle="--", label=method_of(name).label)
                continue
            if own:
                middle, low, high = (np.array([row[key][side] for row in own]) for side in ("value", "low", "high"))
                places = [budgets.index(row["budget"]) for row in own]
                style = {"marker": "o", "capsize": 2, "color": colors[name], "label": method_of(name).label}
                axis.errorbar(places, middle, (middle - low, high - middle), **style)
        axis.set_title(f"{task}, {tokens:,} tokens", fontsize="medium")
        axis.set(xlabel="budget", ylabel="attention mass" if key == "mass" else "correct answers", ylim=(-0.03, 1.03))
        axis.set_xticks(range(len(budgets)), [budget_text(budget) for budget in budgets])
    _name_lines(figure, axes)
    return figure


def _by_bytes(rows: list[dict[str, Any]]) -> Any:
    """Draw one panel per length: a line per method through its budgets, from its bytes to its divergence."""
    lengths, colors = sorted({row["tokens"] for row in rows}), _colors(rows)
    figure, axes = _grid(len(lengths), 2, (5.5, 4.2), (2, 0))
    for axis, tokens in zip(axes, lengths, strict=True):
        for name in colors:
            own = [row for row in rows if (row["tokens"], row["method"]) == (tokens, name)]
            own.sort(key=lambda row: row["read"])
            if own:
                middle, low, high = (np.array([row["kl"][side] for row in own]) for side in ("value", "low", "high"))
                style = {"marker": "o", "capsize": 2, "color": colors[name], "label": method_of(name).label}
                axis.errorbar([100 * row["read"] for row in own], middle, (middle - low, high - middle), **style)
        axis.set(xscale="log", title=f"text, {tokens:,} tokens")
        axis.set(xlabel="KV bytes that a step reads, % of full attention's", ylabel="KL from full attention")
        axis.set_yscale("symlog", linthresh=0.01)  # from 0 on
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_formatter("{x:g}")
    _name_lines(figure, axes)
    return figure


def _colors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a color for each method, in the order of the methods."""
    from matplotlib import pyplot

    every = itertools.cycle(pyplot.get_cmap("tab20").colors)
    return dict(zip(in_order(row["method"] for row in rows), every, strict=False))


def _name_lines(figure: Any, axes: list[Any]) -> None:
    """Name the lines of the panel that has most, beside all panels."""
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
