"""The file of --output: the result of a command as JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bpc_cli.console import plain


def open_result_file(path: Path | None, force: bool, keys: frozenset[str]) -> Callable[[dict[str, Any]], None]:
    """Check that the file can be written, before any work; give the function that writes a result to it.

    `keys` are in every result of the command: a file is replaced only if it is JSON with these keys. The function may
    be called again with more results: it then replaces the file that it wrote.
    """
    if path is None:
        return lambda result: None
    from bpc_artifacts.replacing import Kind, replacing, try_replacing

    kind = Kind("a result of this command", lambda found: _has(found, keys))
    try_replacing(path, 1 << 20, force, kind)
    written = False

    def write(result: dict[str, Any]) -> None:
        nonlocal written
        with replacing(path, force or written, kind) as temporary:
            temporary.write_text(json.dumps(plain(result), indent=1) + "\n")
        written = True

    return write


def _has(path: Path, keys: frozenset[str]) -> bool:
    """Whether a file is a JSON table with all these keys."""
    from bpc_calib.evaluation.saved_result import MOST_BYTES

    if path.stat().st_size > MOST_BYTES:
        return False
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and keys <= set(found)
