"""The memory that this process uses."""

import sys

__all__ = ["memory_now", "peak_memory"]


def memory_now() -> int | None:
    """Bytes of main memory in use; None where the system does not tell."""
    return _status("VmRSS")


def peak_memory() -> int | None:
    """The most bytes of main memory used so far. On Linux `getrusage` would include the process that started it."""
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM")


def _status(name: str) -> int | None:
    if sys.platform != "linux":
        return None
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
