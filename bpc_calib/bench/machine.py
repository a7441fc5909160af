"""Facts about the machine that explain a benchmark result, and the size of its last-level caches."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["available_memory", "cache_bytes", "machine", "without_folder"]

VERSIONS = ("bpc-calib", "torch", "transformers", "triton")
SYSTEM = Path("/sys/devices/system/cpu")
UNKNOWN_CACHE = 32 << 20
CONTROL_GROUPS = Path("/sys/fs/cgroup")
# By the controllers that a line of /proc/self/cgroup names (none in version 2): the folder of the groups, and of each
# the files of its limit and of what it uses, and in memory.stat what of this the system takes back when it needs to.
MEMORY_GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def without_folder(word: str) -> str:
    """Return a word of a command with the folder removed from a path, because folders are private."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{Path(path).name}" if path.startswith(("/", "..", "~")) else word


def machine() -> dict[str, Any]:
    """Return processor, cores, threads, GPU, versions and, in a checkout, the commit; no user name and no path."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    facts = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts |= {"gpu_memory_bytes": gpu.total_memory, "gpu_multiprocessors": gpu.multi_processor_count}
        facts |= {"gpu_l2_bytes": gpu.L2_cache_size, "cuda": torch.version.cuda}
    return facts


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level caches that this process can use; 32 MiB if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes: dict[tuple[int, str], int] = {}  # by level and by the processors that share the cache
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        for index in (SYSTEM / f"cpu{cpu}" / "cache").glob("index*"):
            level, sharing, size = (
                next(iter(_lines(index / name)), "") for name in ("level", "shared_cpu_list", "size")
            )
            if level.isdigit() and size[:-1].isdigit() and size.endswith("K"):
                sizes[int(level), sharing] = int(size[:-1]) << 10
    highest = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == highest) or UNKNOWN_CACHE


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; of main memory, what a container's limit leaves."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    free += [int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    return min(free + _left_in_groups("/proc/self/cgroup", CONTROL_GROUPS))


def _left_in_groups(membership: str, mounted: Path) -> list[int]:
    """Return the bytes that each control group with a limit still has for this process, such as that of a container."""
    left = []
    for _, controllers, path in (line.split(":", 2) for line in _lines(membership)):
        if controllers not in MEMORY_GROUPS:
            continue
        folder, limit, usage, reclaimable = MEMORY_GROUPS[controllers]
        own = mounted / folder / path.lstrip("/")
        for group in (own, *own.parents):  # a container may see only the last of its parents
            most, used = (next(iter(_lines(group / name)), "") for name in (limit, usage))
            if group.is_relative_to(mounted / folder) and most.isdigit() and used.isdigit():
                stat = dict(line.split() for line in _lines(group / "memory.stat"))
                left.append(max(0, int(most) - int(used) + int(stat.get(reclaimable, 0))))
    return left


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    folder = Path(__file__).resolve().parent.parent.parent
    if not (folder / "pyproject.toml").is_file():  # installed: a repository around it is another project
        return None
    words = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
