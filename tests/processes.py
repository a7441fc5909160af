"""Python programs in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path


def started(
    program: str, *words: object, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a new process, in a folder."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"COLUMNS": "100"} | environment,
        timeout=300,
        check=False,
    )
