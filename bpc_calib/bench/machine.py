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
                next(iter(_lines(str(index / name))), "") for name in ("level", "shared_cpu_list", "size")
            )
            if level.isdigit() and size[:-1].isdigit() and size.endswith("K"):
                sizes[int(level), sharing] = int(size[:-1]) << 10
    highest = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == highest) or UNKNOWN_CACHE


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
