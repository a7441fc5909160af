"""Writes docs/performance-results.md from the results of `bpc bench`.

python benchmarks/performance_page.py benchmarks/results/bench_*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "performance-results.md"
FOLDED = "SDPA, group folded"


def main() -> None:
    lines = [
        "# What `bpc bench` measured: all tables",
        "",
        "Written by `benchmarks/performance_page.py`; what follows is in [performance](performance.md), how it",
        "was measured in [benchmarking](benchmarking.md). `of floor`: the time that the bytes would take which cannot",
        "but move, in % of the time taken. The times of other methods are multiples of BPC's: below 1 BPC loses.",
        "",
    ]
    for name in sys.argv[1:]:
        lines += _section(Path(name), json.loads(Path(name).read_text()))
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    print("Wrote docs/performance-results.md")


def _section(path: Path, result: dict[str, Any]) -> list[str]:
    machine, settings, memory = result["machine"], result["settings"], result["memory_bandwidth"]
    lines = [
        f"## {path.stem.removeprefix('bench_').replace('_', ' ')}",
        "",
        f"[{path.name}](../benchmarks/results/{path.name}): `{result['command']}`",
        "",
        f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, backend {result['backend']}, commit "
        f"{machine['commit']}; memory {memory['bytes_per_second'] / 1e9:.1f} GB/s ({memory['by']}); "
        f"{settings['dtype']}.",
        "",
    ]
    if result.get("layer"):
        lines += _layer(result["layer"])
    if result.get("decode"):
        lines += _decode(result["decode"]["rows"])
    if result.get("prefill"):
        lines += _prefill(result["prefill"]["rows"])
    if result.get("crossover"):
        lines += _crossover(result["crossover"])
    return lines


def _layer(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each step of BPC: its stages, and the others in multiples of it."""
    stages = ("encode", "project", "score", "select", "attend", "step")
    heads = ["batch", "G", "tokens", "attended", *(f"{each}, us" for each in stages), "of floor"]
    heads += ["SDPA, group folded", "best dense", "paper's pipeline"]
    lines = [*_heading(heads)]
    for row in rows:
        if row["method"] != "BPC" or row["stage"] != "step" or not row["median"]:
            continue
        same = [each for each in rows if all(each[key] == row[key] for key in ("batch", "group", "tokens"))]
        own = {each["stage"]: each["median"] for each in same if each["method"] == "BPC" and _of(each, row)}
        dense = {each["form"]: each["median"] for each in same if each["method"] == "dense" and each["median"]}
        paper = [each["median"] for each in same if each["method"] == "paper" and _of(each, row) and each["median"]]
        ratios = [dense.get(FOLDED), min(dense.values(), default=None), min(paper, default=None)]
        cells = [row["batch"], row["group"], f"{row['tokens']:,}", f"{row['attended']:,}"]
        cells += [f"{own[stage]:,.0f}" if own.get(stage) is not None else "" for stage in stages]
        cells += [f"{100 * row['floor_share']:.0f} %", *(_times(each, row["median"]) for each in ratios)]
        lines.append(_line(cells))
    return [*lines, ""]


def _of(row: dict[str, Any], step: dict[str, Any]) -> bool:
    return row["budget"] == step["budget"]


def _decode(rows: list[dict[str, Any]]) -> list[str]:
    lines = [*_heading(["batch", "tokens", "attended", "", "tokens/s", "ms", "of floor", "times BPC's"])]
    for row in rows:
        sides = {"BPC": row["bpc"], "a sparse attention that is free": row["free"]}
        sides |= {f"full attention, {name}": each for name, each in row["dense_forms"].items()}
        for name, side in sides.items():
            if not side.get("milliseconds"):
                continue
            cells = [
                row["batch"],
                f"{row['tokens']:,}",
                f"{row['attended']:,}",
                name,
                f"{side['tokens_per_second']:.2f}",
            ]
            cells += [f"{side['milliseconds']:.1f}", f"{100 * side['floor_share']:.0f} %"]
            lines.append(_line([*cells, _times(side["milliseconds"], row["bpc"]["milliseconds"])]))
    return [*lines, ""]


def _prefill(rows: list[dict[str, Any]]) -> list[str]:
    lines = [*_heading(["", "tokens", "full attention, s", "BPC, s", "of it hashing, s"])]
    for row in rows:
        cells = [f"{row[side]['median']:.3f}" if side in row else "" for side in ("full", "bpc", "hashing")]
        lines.append(_line([row["what"], f"{row['tokens']:,}", *cells]))
    return [*lines, ""]


def _crossover(found: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for each in found:
        lines += _heading(["batch", "G", "tokens", "BPC, us", "dense, us", "dense / BPC"])
        for row in each["rows"]:
            own, dense = row["sparse"]["median"], row["dense"]["median"]
            cells = [each["batch"], each["group"], f"{row['tokens']:,}", f"{own:,.0f}", f"{dense:,.0f}"]
            lines.append(_line([*cells, _times(dense, own)]))
        lines += ["", f"So `min_context={each['min_context']}`.", ""]
    return lines


def _times(other: float | None, own: float) -> str:
    return "" if other is None else f"{other / own:.2f}"


def _heading(cells: list[str]) -> list[str]:
    return [_line(cells), "|---" * len(cells) + "|"]


def _line(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
