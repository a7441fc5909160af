"""Plot a result of `run` (matplotlib, extra `plots`)."""

from pathlib import Path
from typing import Any

from bpc_artifacts.replacing import PICTURE, replacing
from bpc_calib.method.defaults import budget_text

__all__ = ["draw"]

COLORS = {"BPC": "tab:blue", "dense": "tab:gray", "paper": "tab:orange"}


def draw(result: dict[str, Any], path: Path, *, overwrite: bool = False) -> None:
    """Draw one panel per measured case of every part of the result: layer, crossover, decoding and prefill."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: list[Any] = []
    layer = result.get("layer", [])
    for batch, group, budget in dict.fromkeys(
        (row["batch"], row["group"], row["budget"]) for row in layer if row["method"] == "BPC"
    ):
        panels.append((_layer, [r for r in layer if (r["batch"], r["group"]) == (batch, group)], batch, group, budget))
    for crossover in result.get("crossover", []):
        panels.append((_crossover, crossover))
    if rows := result.get("decode", {}).get("rows"):
        panels.append((_decode, rows))
    if hashed := result.get("prefill", {}).get("rows"):
        panels.append((_prefill, hashed))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns, 4.2 * lines), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (function, *arguments) in zip(axes.flat, panels, strict=False):
        function(axis, *arguments)
    with replacing(path, overwrite, PICTURE) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)
    pyplot.close(figure)


def _layer(axis: Any, rows: list[dict[str, Any]], batch: int, group: int, budget: float | int) -> None:
    for method, color in COLORS.items():
        own = [
            row
            for row in rows
            if row["method"] == method and row["stage"] == "step" and row.get("budget", budget) == budget
        ]
        own = [row for row in own if row["median"] and row.get("best", True)]
        if own:
            _line(axis, [row["tokens"] for row in own], own, method, color)
            axis.plot([row["tokens"] for row in own], [row["floor"] for row in own], color=color, linestyle=":")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds per step (dotted: byte floor)")
    axis.set_title(f"One layer, batch {batch}, group {group}, {budget_text(budget)}", fontsize="medium")
    axis.legend(fontsize="small")


def _crossover(axis: Any, found: dict[str, Any]) -> None:
    lengths = [row["tokens"] for row in found["rows"]]
    _line(axis, lengths, [row["sparse"] for row in found["rows"]], "BPC", COLORS["BPC"])
    _line(axis, lengths, [row["dense"] for row in found["rows"]], "dense", COLORS["dense"])
    if found["min_context"]:
        axis.axvline(found["min_context"], color="black", linestyle=":", label=f"min_context={found['min_context']}")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds per step")
    about = f"batch {found['batch']}, group {found['group']}, {budget_text(found['budget'])}"
    axis.set_title(f"Crossover of BPC and dense attention, {about}", fontsize="medium")
    axis.legend(fontsize="small")


def _line(axis: Any, lengths: list[int], rows: list[dict[str, Any]], label: str, color: str) -> None:
    around = [
        [row["median"] - row["spread"][0] for row in rows],
        [row["spread"][1] - row["median"] for row in rows],
    ]
    axis.errorbar(lengths, [row["median"] for row in rows], around, marker="o", capsize=2, label=label, color=color)


def _decode(axis: Any, rows: list[dict[str, Any]]) -> None:
    names = {"full": ("full attention", "tab:gray"), "bpc": ("BPC", "tab:blue"), "free": ("limit", "tab:green")}
    for i, (name, (label, color)) in enumerate(names.items()):
        places = [place + 0.27 * (i - 1) for place in range(len(rows))]
        axis.bar(places, [row[name].get("tokens_per_second") or 0 for row in rows], 0.25, label=label, color=color)
    marks = [f"{row['tokens']:,}\nbatch {row['batch']}, {budget_text(row['budget'])}" for row in rows]
    axis.set_xticks(range(len(rows)), marks, fontsize="small")
    axis.set(ylabel="tokens/s")
    axis.set_title("Decoding", fontsize="medium")
    axis.legend(fontsize="small")


def _prefill(axis: Any, rows: list[dict[str, Any]]) -> None:
    own = next((row for row in rows if "hashing_share" in row), None)
    if own is None:
        axis.set_axis_off()
        return
    axis.bar(["full attention", "BPC"], [own["full"]["median"], own["bpc"]["median"]], color=["tab:gray", "tab:blue"])
    axis.bar(["BPC"], [own["hashing"]["median"]], color="tab:red", label="hashing, part of BPC")
    axis.set(ylabel="seconds")
    axis.set_title(f"Prefill of {own['tokens']:,} tokens", fontsize="medium")
    axis.legend(fontsize="small")
