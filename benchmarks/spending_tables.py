"""The tables on other ways to spend a budget than on the best tokens, from the results of `beyond_top_k.py`."""

from typing import Any

from markdown_table import Results, percent, table
from real_tables import NOTHING, spread

__all__ = ["spending", "spending_all"]

FILES = [f"beyond_{model}_{length}" for model in ("smollm2", "gemma3") for length in (2048, 8192)]
FIRST = "the best"


def spending(results: Results) -> str:
    """A line per model, length and budget: the divergence of every way that ranks by signs, against the best tokens."""
    names, lines = ways(results), []
    for (model, tokens, budget), rows in measured(results).items():
        best = rows["signs", FIRST]["kl"]["value"]
        ratios = [f"{rows['signs', way]['kl']['value'] / best:.2f}" for way in names if way != FIRST]
        lines.append([model, f"{tokens:,}", f"{percent(budget)} %", f"{best:.3f}", *ratios])
    heads = ["model", "tokens", "attended", "KL of the best", *(f"{way}, times" for way in names if way != FIRST)]
    return table(heads, lines) if lines else NOTHING


def spending_all(results: Results) -> str:
    """A line per model, length, budget and kind of scores: the divergence and the loss of every way, with intervals."""
    names, lines = ways(results), []
    for (model, tokens, budget), rows in measured(results).items():
        for kind in dict.fromkeys(scores for scores, _ in rows):
            found = [rows[kind, way] for way in names]
            cells = [f"{spread(row['kl'])}, {row['loss_difference']['value']:.3f}" for row in found]
            lines.append([model, f"{tokens:,}", f"{percent(budget)} %", kind, *cells])
    return table(["model", "tokens", "attended", "scores", *names], lines) if lines else NOTHING


def measured(results: Results) -> dict[tuple[str, int, float], dict[tuple[str, str], Any]]:
    """The rows by model, length and budget, then by scores and way."""
    found: dict[tuple[str, int, float], dict[tuple[str, str], Any]] = {}
    for result in (results[name] for name in FILES if name in results):
        for row in result["rows"]:
            rows = found.setdefault((result["model"].removesuffix("-Instruct"), row["tokens"], row["budget"]), {})
            rows[row["scores"], row["way"]] = row
    return found


def ways(results: Results) -> list[str]:
    """The ways in the order of the study."""
    return list(dict.fromkeys(way for rows in measured(results).values() for _, way in rows))
