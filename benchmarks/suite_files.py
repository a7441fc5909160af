"""What the suites share: the packages of this checkout, a hash of the measured code, and files written whole."""

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["link_packages", "replace", "sources", "write"]


def link_packages(folder: Path, root: Path) -> None:
    """Measure this checkout, installed or not: link its folders under the names that they have when installed."""
    for name, source in (("bpc_calib", "bpc_calib"), ("bpc_artifacts", "artifacts"), ("bpc_cli", "cli")):
        (folder / name).symlink_to(root / source)
    found = re.search(r'^version = "(.*)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    about = folder / "bpc_calib-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bpc-calib\nVersion: {found[1] if found else 0}\n")


def write(path: Path | None, result: dict[str, Any], *, quiet: bool = False) -> None:
    """Write a result as JSON; None writes nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps(result, indent=2) + "\n")
    if not quiet:
        print(f"Wrote {path}", file=sys.stderr, flush=True)


def replace(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)


def sources(root: Path) -> str:
    """A hash of the measured code: a checkout that is not a repository has no commit."""
    digest = hashlib.sha256()
    for folder in ("artifacts", "bpc_calib"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
