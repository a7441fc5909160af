"""What every benchmark writes beside its figures: the command, the machine, the versions, the commit."""

import json
import sys
from pathlib import Path
from typing import Any

from bpc_calib.bench.machine import machine, without_folder

__all__ = ["machine", "without_folder", "write"]


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write `result` with the machine and the command as JSON; paths in the command lose their folders."""
    if path is None:
        return
    words = [without_folder(word) for word in sys.argv]
    document = {"command": " ".join(["python", *words]), "machine": machine(), **result}
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"Wrote {path}", file=sys.stderr)
