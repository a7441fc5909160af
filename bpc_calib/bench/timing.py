"""Measure times (interleaved repeats, cold caches, CUDA graphs between events) and the memory bandwidth."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bpc_calib.backends.linear import linear, slow_in_torch
from bpc_calib.backends.pages import in_huge_pages
from bpc_calib.bench.machine import cache_bytes

__all__ = ["Call", "bandwidth", "captured", "clock", "reason", "summary", "synchronize", "timed"]

STEPS = 32  # minimum number of calls per timed sample on a GPU
WARM_UP = 3
REPEATS = 7  # of a measurement of the bandwidth
COLUMNS = 4096

Call = Callable[[], Any]


def reason(error: Exception) -> str:
    """Return one line that says why something was not measured."""
    return f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def summary(samples: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """Return the rounded median and, as `spread`, minimum and maximum."""
    median, least, most = statistics.median(samples), min(samples), max(samples)
    return {"median": round(median, digits), "spread": [round(least, digits), round(most, digits)]}


def synchronize(device: torch.device) -> None:
    """Wait for all work of a GPU; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(run: Call, device: torch.device) -> float:
    """Return the seconds of `run`: on a GPU between two events, elsewhere wall time."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began_at.record()
    run()
    ended_at.record()
    ended_at.synchronize()
    return began_at.elapsed_time(ended_at) / 1e3


def captured(calls: Sequence[Call], device: torch.device) -> Call:
    """Return the sequence of calls as one function: on a GPU a CUDA graph, whose replay contains no Python time."""
    if device.type != "cuda":
        return functools.partial(_in_turn, calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            calls[0]()
        _in_turn(calls)  # so that everything is compiled and loaded before the capture
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _in_turn(calls)
    return graph.replay


def timed(forms: Mapping[str, Sequence[Call]], repeats: int, device: torch.device) -> dict[str, list[float] | str]:
    """Return microseconds per call of each form, in `repeats` samples taken in turn; or why it was not timed.

    Args:
        forms: a list of calls per form. The calls do the same work on different working sets, so that a set has left
            the caches when it is used again.
    """
    runs: dict[str, tuple[Call, int]] = {}
    samples: dict[str, list[float] | str] = {}
    for name, calls in forms.items():
        try:
            calls[0]()
            run = captured(calls, device)
            run()
            synchronize(device)
        except Exception as error:
            samples[name] = reason(error)
            continue
        # With several replays in a row, the GPU works on one while the next is launched.
        times = -(-STEPS // len(calls)) if device.type == "cuda" else 1
        runs[name] = (functools.partial(_in_turn, [run] * times), times * len(calls))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, steps) in runs.items():
            taken[name].append(1e6 * clock(run, device) / steps)
    return samples | taken


def _copies(size: int, device: torch.device) -> list[float]:
    """Return bytes per second of copies of `size` bytes in the device's memory, counting reads and writes."""
    source = torch.ones(size // 4, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    copy()
    return [2 * source.nbytes / clock(copy, device) for _ in range(REPEATS)]


def _reads(size: int, device: torch.device) -> dict[str, list[float]]:
    """Return bytes per second of ways to read `size` bytes of the device's memory."""
    source = in_huge_pages(torch.empty(size // COLUMNS // 4, COLUMNS, device=device)).fill_(1)
    ways: dict[str, Call] = {"streaming read": source.sum}
    if slow_in_torch(source):
        ways["product with a token"] = functools.partial(linear, source[:1], source)
    rates = {}
    for name, way in ways.items():
        way()
        rates[name] = [source.nbytes / clock(way, device) for _ in range(REPEATS)]
    return rates


@functools.cache  # seconds of work, and a machine does not change
def bandwidth(device: torch.device) -> dict[str, Any]:
    """Measure the memory bandwidth for the byte floors, once per process: the fastest of several ways.

    These are a streaming read, a copy, and BPC's product of a matrix and a token where BPC uses it.

    Returns:
        `bytes_per_second`, its `spread` (minimum and maximum of the repeats), `by` (the fastest way), and
        `working_set_bytes`, much larger than the last-level cache.
    """
    size = max(1 << 28, 4 * cache_bytes(device)) if device.type != "cuda" else 1 << 31
    rates = _reads(size, device) | {"copy, bytes read and written": _copies(size, device)}
    best = max(rates, key=lambda name: statistics.median(rates[name]))
    rate, spread = summary(rates[best], 0).values()
    return {"bytes_per_second": rate, "spread": spread, "by": best, "working_set_bytes": size}


def _in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
