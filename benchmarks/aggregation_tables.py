"""The table of docs/evaluating.md about answers that depend on a whole list, from the result of aggregation.py."""

from markdown_table import Results, percent, table

from bpc_calib.evaluation.methods import METHODS

__all__ = ["aggregation"]


def aggregation(results: Results) -> str:
    """Right answers in %, one line per method and budget, one column per task and length."""
    rows = results["aggregation"]["rows"]
    columns = list(dict.fromkeys((row["task"], row["tokens"]) for row in rows))
    lines = []
    for method, budget in dict.fromkeys((row["method"], row["budget"]) for row in rows):
        found = {
            (row["task"], row["tokens"]): row["score"]
            for row in rows
            if (row["method"], row["budget"]) == (method, budget)
        }
        share = "" if budget is None else f"{percent(budget, 0)} %"
        lines.append([METHODS[method].label, share, *(_interval(found[each]) for each in columns)])
    return table(["", "budget", *(f"{task}, {tokens:,} tokens" for task, tokens in columns)], lines)


def _interval(figure: dict[str, float]) -> str:
    return f"{percent(figure['value'])} ({percent(figure['low'], 0)} to {percent(figure['high'], 0)})"
