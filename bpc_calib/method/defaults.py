"""The defaults of decoding, and a budget in words. Importing this file is cheap: the help of the commands loads it."""

from typing import Any

__all__ = ["BUDGET", "DENSE_LAYERS", "MIN_TOKENS", "MOST_DRAFTED", "PRESETS", "budget_text"]

BUDGET = 0.02  # share of the tokens
MIN_TOKENS = 192  # of a short context, 2 % is too few (docs/history.md)
DENSE_LAYERS = (0, 1)  # the first layers attend to everything
MOST_DRAFTED = 16  # tokens that one pass of full attention verifies

# Settings of `BPCCache` by name. With `hard` every layer must choose, which shows differences between methods best.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {"budget": BUDGET, "min_tokens": MIN_TOKENS, "dense_layers": None},
    "fast": {"budget": 0.01, "min_tokens": 64, "dense_layers": None},
    "hard": {"budget": BUDGET, "min_tokens": 1, "dense_layers": ()},
}


def budget_text(budget: float | int) -> str:
    """Return a budget as text, like 2 % or 1,024 tokens."""
    return f"{budget:,} token{'s' * (budget > 1)}" if isinstance(budget, int) else f"{100 * budget:.3g} %"
