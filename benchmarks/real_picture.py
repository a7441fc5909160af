"""The picture of trained models: what attending to less costs, by the share of the KV bytes that is read."""

from pathlib import Path
from typing import Any

import real_tables
from markdown_table import Results

__all__ = ["NAME", "draw"]

NAME = "real-models.png"
INK = "#7d8590"  # readable on white and on black: the picture has no background
STYLES = {  # marker and colour
    "bpc": ("o", "#2f81f7"),
    "bpc-product": ("v", "#58a6ff"),
    "bpc-online": ("s", "#a371f7"),
    "paper": ("D", "#d29922"),
    "oracle": ("^", "#2da44e"),
    "random": ("x", "#f85149"),
}


def draw(results: Results, folder: Path) -> Path | None:
    """Draw a panel per model, at the headline's length; return the file, or None if nothing has been measured."""
    import matplotlib
    from matplotlib import pyplot

    measured = real_tables.on_text(results)
    if not measured:
        return None
    matplotlib.use("agg")
    with matplotlib.rc_context(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)):
        figure, axes = pyplot.subplots(
            1, len(measured), figsize=(4.6 * len(measured), 3.4), layout="constrained", squeeze=False, sharey=True
        )
        for axis, (model, found) in zip(axes.flat, measured.items(), strict=True):
            tokens = real_tables.longest(found["rows"], real_tables.LENGTH)
            rows = [row for row in found["rows"] if row["tokens"] == tokens]
            for method in STYLES:
                _curve(axis, method, [row for row in rows if row["method"] == method])
            _frame(axis, f"{model}, {tokens:,} tokens")
        axes.flat[0].set_ylabel("perplexity above full attention's, %")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        columns = 3 if len(measured) == 1 else len(labels)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
        folder.mkdir(exist_ok=True)
        figure.savefig(folder / NAME, dpi=150, transparent=True)
        pyplot.close(figure)
    return folder / NAME


def _curve(axis: Any, method: str, rows: list[dict[str, Any]]) -> None:
    """One point per budget, with its interval."""
    from math import expm1

    rows = sorted(rows, key=lambda row: row["read"])
    losses = [row["loss_difference"] for row in rows]
    middle = [100 * expm1(loss["value"]) for loss in losses]
    below = [value - 100 * expm1(loss["low"]) for value, loss in zip(middle, losses, strict=True)]
    above = [100 * expm1(loss["high"]) - value for value, loss in zip(middle, losses, strict=True)]
    (marker, color), name = STYLES[method], real_tables.label(method).replace("`", "")
    reads = [100 * row["read"] for row in rows]
    axis.errorbar(reads, middle, [below, above], marker=marker, color=color, capsize=2, label=name)


def _frame(axis: Any, title: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_title(title, fontsize="medium")
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=1)
    axis.set_xlabel("share of the KV bytes read, %")
    axis.set_xlim(0.4, 120)
    axis.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.axhline(0, color=INK, linewidth=0.8, linestyle="--")
    axis.tick_params(labelsize="small")
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(INK)
