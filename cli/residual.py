"""The name of a residual."""

from typing import Any

__all__ = ["residual_title"]


def residual_title(algorithm: dict[str, Any]) -> str:
    """What residuals are shares of; residuals with different titles cannot be compared."""
    keys = "K - mean" if algorithm["centred"] else "K"
    metric = " in the query metric" if algorithm["metric"] else ""
    return f"Residual |{keys} - UP| / |{keys}|{metric}"
