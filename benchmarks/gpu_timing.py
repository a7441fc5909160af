"""`bpc_calib.bench.timing` on the GPU, or on the CPU without a GPU, for `gpu_suite.py`."""

from collections.abc import Mapping, Sequence

import torch

from bpc_calib.bench import timing
from bpc_calib.bench.timing import Call, reason, summary

__all__ = ["bandwidth", "captured", "clock", "device", "reason", "summary", "timed"]


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
