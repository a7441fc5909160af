"""The file of --output: the result of a command as JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["open_result_file"]


def open_result_file(path: Path | None, force: bool) -> Callable[[dict[str, Any]], None]:
    """Check that the file can be written, before any work; give the function that writes a result to it.

    The function may be called again with more results: it then replaces the file that it wrote.
    """
    if path is None:
        return lambda result: None
    from bpc_artifacts.file import check_writable, replacing

    check_writable(path, 1 << 20, overwrite=force)
    written = False

    def write(result: dict[str, Any]) -> None:
        nonlocal written
        with replacing(path, force or written) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n")
        written = True

    return write
