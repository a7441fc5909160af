"""Peak memory: what was allocated on a GPU, elsewhere the resident set of the process."""

import contextlib
import resource
import sys

import torch

__all__ = ["peak", "reset_peak"]


def reset_peak(device: torch.device) -> None:
    """Start the peak again at the current use, if the system supports that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak(device: torch.device) -> int:
    """Return the peak in bytes since `reset_peak`, or since the start of the process if the system cannot reset it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)
