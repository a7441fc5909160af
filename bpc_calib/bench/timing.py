"""How times are taken: interleaved repeats, caches cold, CUDA graphs between events; and how fast the memory is."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bpc_calib.bench.machine import cache_bytes

__all__ = ["Call", "bandwidth", "captured", "clock", "copies", "reason", "summary", "synchronize", "timed"]

STEPS = 32  # at least so many in what is timed at once on a GPU
WARM_UP = 3

Call = Callable[[], Any]


def reason(error: Exception) -> str:
    """One line, as a result says why something was not measured."""
    return f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def summary(samples: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """The median, the least and the most."""
    if not samples:
        return {"median": None, "spread": None}
    median, least, most = statistics.median(samples), min(samples), max(samples)
    return {"median": round(median, digits), "spread": [round(least, digits), round(most, digits)]}


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(run: Call, device: torch.device) -> float:
    """Seconds: on a GPU its own, between two events; elsewhere those of the wall."""
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
    """The calls, one after the other, as one CUDA graph: no time of Python's is in its replay."""
    if device.type != "cuda":
        return functools.partial(_in_turn, calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            calls[0]()
        _in_turn(calls)  # whatever is compiled or loaded for one of them is so before the capture
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _in_turn(calls)
    return graph.replay


def timed(
    forms: Mapping[str, Sequence[Call]], repeats: int, device: torch.device, *, graphs: bool = True
) -> dict[str, list[float] | str]:
    """Microseconds a call of each form, `repeats` samples taken in turn; or why there are none.

    Args:
        forms: each a list of calls that do the same on working sets of their own, so that by the time a set comes
            again no cache holds it.
        graphs: whether the calls of a form are replayed as a CUDA graph, where there is a GPU.
    """
    runs: dict[str, tuple[Call, int]] = {}
    samples: dict[str, list[float] | str] = {}
    for name, calls in forms.items():
        try:
            calls[0]()
            run = captured(calls, device) if graphs else functools.partial(_in_turn, calls)
            run()
            synchronize(device)
        except Exception as error:
            samples[name] = reason(error)
            continue
        # Several replays at once: the launch of one is hidden behind the one before.
        times = -(-STEPS // len(calls)) if device.type == "cuda" else 1
        runs[name] = (functools.partial(_in_turn, [run] * times), times * len(calls))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, steps) in runs.items():
            taken[name].append(1e6 * clock(run, device) / steps)
    return samples | taken


def copies(size: int, device: torch.device, repeats: int = 7) -> list[float]:
    """Bytes a second of copies of so many bytes within the device's memory, those read and those written both."""
    source = torch.ones(size // 4, device=device)
    target: Tensor = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    copy()
    return [2 * source.nbytes / clock(copy, device) for _ in range(repeats)]


def bandwidth(device: torch.device) -> dict[str, Any]:
    """The memory bandwidth that floors are divided by: the better of a streaming read and of a copy.

    Returns:
        `bytes_per_second`, its `spread` (the least and the most of the repeats), `by`, and `working_set_bytes`, well
        beyond the last cache.
    """
    size = max(1 << 28, 4 * cache_bytes(device)) if device.type != "cuda" else 1 << 31
    held = torch.ones(size // 8, dtype=torch.int64, device=device)
    held.sum()
    found = {"streaming read": [held.nbytes / clock(held.sum, device) for _ in range(7)]}
    del held
    found["copy, bytes read and written"] = copies(size, device)
    best = max(found, key=lambda name: statistics.median(found[name]))
    about = summary(found[best], 0)
    return {
        "bytes_per_second": about["median"],
        "spread": about["spread"],
        "by": best,
        "working_set_bytes": size,
    }


def _in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
