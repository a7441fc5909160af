"""Times of several calls that run in turn, so that a busy moment of the machine slows all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["interleaved"]


def interleaved(
    calls: Mapping[str, Callable[[], Any]], repeats: int, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Median seconds of each call; `before` runs ahead of each, and is not timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            before()
            began = time.perf_counter()
            call()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in times.items()}
