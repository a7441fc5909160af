"""The defaults of decoding, and a budget in words; without imports, since the help of the commands loads this file."""

__all__ = ["BUDGET", "DENSE_LAYERS", "MIN_TOKENS", "budget_text"]

BUDGET = 0.02  # share of the tokens
MIN_TOKENS = 128
DENSE_LAYERS = (0, 1)  # the first layers attend to everything


def budget_text(budget: float | int) -> str:
    """Return a budget as text, like 2 % or 1,024 tokens."""
    return f"{budget:,} token{'s' * (budget > 1)}" if isinstance(budget, int) else f"{100 * budget:.3g} %"
