"""`bpc_calib.bench.timing` on the GPU, or on the CPU without a GPU, for `gpu_suite.py`."""

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bpc_calib.bench import timing
from bpc_calib.bench.timing import Call, reason, summary

__all__ = ["bandwidth", "bandwidth_row", "captured", "clock", "device", "reason", "summary", "timed"]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clock(run: Call) -> float:
    """Seconds."""
    return timing.clock(run, device())


def captured(calls: Sequence[Call]) -> Call:
    """The calls as one CUDA graph."""
    return timing.captured(calls, device())


def timed(forms: Mapping[str, Sequence[Call]], repeats: int, *, graphs: bool) -> dict[str, list[float] | str]:
    """Microseconds per call of each form."""
    return timing.timed(forms, repeats, device(), graphs=graphs)


def bandwidth(megabytes: int, repeats: int = 11) -> list[float]:
    """Bytes per second of copies within the device's memory, counting bytes read and bytes written."""
    return timing.copies(megabytes << 20, device(), repeats)


@functools.cache
def bandwidth_row(*, tiny: bool) -> tuple[float, dict[str, Any]]:
    """Bytes per second of a copy within the memory, and the row that reports it; measured once in a process."""
    megabytes = 4 if tiny else 4096
    rates = [each / 1e9 for each in bandwidth(megabytes)]
    row = {"what": f"copy of {megabytes:,} MiB, GB/s, bytes read and written", **summary(rates)}
    return 1e9 * statistics.median(rates), row
