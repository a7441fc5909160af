"""A budget in words; without imports, since the help of the commands loads this file."""

__all__ = ["budget_text"]


def budget_text(budget: float | int) -> str:
    """Return a budget as text, like 2 % or 1,024 tokens."""
    return f"{budget:,} token{'s' * (budget > 1)}" if isinstance(budget, int) else f"{100 * budget:.3g} %"
