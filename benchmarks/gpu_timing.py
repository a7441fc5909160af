"""Timing for `gpu_suite.py`: CUDA graphs replayed between events, working sets that leave no cache warm, the copy."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["bandwidth", "captured", "clock", "device", "reason", "summary", "timed"]

STEPS = 32  # at least so many in what is timed at once
WARM_UP = 3

Call = Callable[[], Any]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def reason(error: Exception) -> str:
    """One line, as a result says why something was not measured."""
    return f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def summary(samples: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """The median, the least and the most."""
    if not samples:
        return {"median": None, "spread": None}
    median, least, most = statistics.median(samples), min(samples), max(samples)
    return {"median": round(median, digits), "spread": [round(least, digits), round(most, digits)]}


def clock(run: Call) -> float:
    """Seconds: on a GPU its own, between two events; elsewhere those of the wall."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def captured(calls: Sequence[Call]) -> Call:
    """The calls, one after the other, as one CUDA graph: no time of Python's is in its replay."""
    if not torch.cuda.is_available():
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


def timed(forms: dict[str, Sequence[Call]], repeats: int, *, graphs: bool) -> dict[str, list[float] | str]:
    """Microseconds a call of each form, `repeats` samples taken in turn; or why there are none.

    Args:
        forms: each a list of calls that do the same on working sets of their own, so that by the time a set comes
            again no cache holds it.
        graphs: whether the calls of a form are replayed as a CUDA graph.
    """
    runs: dict[str, tuple[Call, int]] = {}
    samples: dict[str, list[float] | str] = {}
    for name, calls in forms.items():
        try:
            calls[0]()
            run = captured(calls) if graphs else functools.partial(_in_turn, calls)
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            samples[name] = reason(error)
            continue
        # Several replays at once: the launch of one is hidden behind the one before.
        times = -(-STEPS // len(calls)) if torch.cuda.is_available() else 1
        runs[name] = (functools.partial(_in_turn, [run] * times), times * len(calls))
        samples[name] = []
    for repeat in range(repeats + 1):
        for name, (run, steps) in runs.items():
            seconds = clock(run)
            if repeat:  # the first one warms up
                samples[name].append(1e6 * seconds / steps)
    return samples


def bandwidth(megabytes: int, repeats: int = 11) -> list[float]:
    """Bytes a second of copies within the device's memory, those read and those written counted both."""
    source = torch.randn(megabytes << 18, device=device())  # float32
    target: Tensor = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    copy()
    return [2 * source.nbytes / clock(copy) for _ in range(repeats)]


def _in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
