"""The tables on kinds of codes: what they keep on real text, and what product codes cost beside signs."""

from typing import Any

from markdown_table import Results, percent, table
from real_tables import NOTHING, on_text, spread

__all__ = ["code_quality", "code_time"]

KINDS = ("oracle", "bpc", "bpc-product")


def code_quality(results: Results) -> str:
    """A line per model, length and budget: divergence, mass and cosine of the exact best tokens and of both kinds."""
    lines = []
    for model, found in on_text(results).items():
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in found["rows"]:
            groups.setdefault((row["tokens"], row["budget"], row["forced"]), {})[row["method"]] = row
        for (tokens, budget, _), rows in sorted(groups.items(), key=lambda each: (each[0][0], -(each[0][1] or 0))):
            if not all(kind in rows for kind in KINDS):
                continue
            alike = [rows[kind] for kind in KINDS]
            exact, signs, product = (row["kl"]["value"] for row in alike)
            closed = percent((signs - product) / (signs - exact), 0)
            lines.append(
                [
                    model.removesuffix("-Instruct"), f"{tokens:,}", f"{percent(budget)} %",
                    *(spread(row["kl"]) for row in alike), f"{closed} %",
                    *(f"{row['mass']['value']:.3f}, {row['cosine']['value']:.3f}" for row in alike),
                ]
            )  # fmt: skip
    heads = [
        "model", "tokens", "attended", "KL: exact best", "signs", "product", "of the gap",
        "mass, cosine: exact best", "signs", "product",
    ]  # fmt: skip
    return table(heads, lines) if lines else NOTHING


def code_time(results: Results) -> str:
    """A line per layer and length: how many times as long product codes take as signs."""
    rows = results["codes_time"]["rows"]
    names = list(dict.fromkeys(row["what"] for row in rows))
    times: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        times.setdefault((row["shape"], row["tokens"]), {})[row["what"]] = row
    lines = [
        [
            shape,
            f"{tokens:,}",
            *(f"{each[name]['ratio of product']:.2f}" for name in names),
            f"{each['a step']['ratio of signs at 5 %']:.2f}",
            f"{each['a step']['signs']:.2f} ms",
        ]
        for (shape, tokens), each in times.items()
    ]
    return table(["layer of", "tokens", *names, "a step with signs at 5 %", "a step with signs"], lines)
