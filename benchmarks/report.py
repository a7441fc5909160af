"""What every benchmark writes beside its figures: the command, the machine, the versions, the commit."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """The facts without which a figure means little."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("bpc-calib", "torch", "transformers")},
        "commit": _commit(),
    }


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write `result` with the machine and the command as JSON; paths in the command lose their folders."""
    if path is None:
        return
    words = [base(word) for word in sys.argv]
    document = {"command": " ".join(["python", *words]), "machine": machine(), **result}
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"Wrote {path}", file=sys.stderr)


def base(word: str) -> str:
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{Path(path).name}" if path.startswith(("/", "..", "~")) else word


def _commit() -> str | None:
    folder = Path(__file__).parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
