"""Held-out samples: their keys are kept aside, and measure the projections on text that these were not fitted to."""

from typing import Any

from torch import Tensor

__all__ = ["held_out_metrics", "held_out_samples"]

SHARE = 16  # one sample in so many


def held_out_samples(samples: int) -> list[int]:
    """Return the indices of the held-out samples: about 1 in 16, at least one, spread evenly; none of one sample."""
    count = max(1, samples // SHARE) if samples > 1 else 0
    return [(2 * i + 1) * samples // (2 * count) for i in range(count)]


def held_out_metrics(residuals: dict[int, Tensor], samples: int, keys_per_head: int) -> dict[str, Any]:
    """Return the table `metrics.held_out` of the artifact.

    Args:
        residuals: float64 `[kv_heads]` by layer: the residual on the held-out keys after all bits.
        samples: the number of held-out samples.
        keys_per_head: the number of held-out keys per KV head.
    """
    by_layer = {str(layer): float(each.mean()) for layer, each in residuals.items()}
    return {
        "samples": samples,
        "keys_per_head": keys_per_head,
        "residual": sum(by_layer.values()) / len(by_layer),
        "residual_by_layer": by_layer,
        "residual_by_head": {str(layer): each.tolist() for layer, each in residuals.items()},
    }
