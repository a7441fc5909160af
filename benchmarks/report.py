"""What the scripts share: their arguments, the JSON that they write, the packages of this checkout, and tables."""

import argparse
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "ROOT", "Results", "command", "filled", "keep", "link", "link_packages", "machine", "make_parser", "parse",
    "percent", "settings", "sources", "table", "write",
]  # fmt: skip

ROOT = Path(__file__).parent.parent
Results = Mapping[str, Any]  # the committed results by file name, without its suffix


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", "-o", type=Path, help="write the result to this file, as JSON")
    parser.add_argument("--tiny", action="store_true", help="check the script in seconds: the figures mean nothing")
    return parser


def parse(parser: argparse.ArgumentParser, **tiny: Any) -> argparse.Namespace:
    """The arguments; `--tiny` replaces the defaults by those of `tiny`."""
    if parser.parse_args().tiny:
        parser.set_defaults(**tiny)
    return parser.parse_args()


def settings(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The arguments of these names."""
    return {name: getattr(arguments, name) for name in names}


def machine() -> dict[str, Any]:
    """Processor, cores, versions and commit; imported late, because the suites choose the packages first."""
    from bpc_calib.bench import machine

    return machine.machine()


def command() -> str:
    """The command of this process; paths lose their folders."""
    from bpc_calib.bench.machine import without_folder

    return " ".join(["python", *map(without_folder, sys.argv)])


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write `result` with the command, the machine, the versions and the commit as JSON."""
    keep(path, {"command": command(), "machine": machine(), **result})


def keep(path: Path | None, result: dict[str, Any], *, quiet: bool = False) -> None:
    """Write a whole result as JSON or nothing; without a path nothing."""
    if path is None:
        return
    from bpc_artifacts.replacing import replacing  # late, because the suites choose the packages first

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, overwrite=True) as beside:
        beside.write_text(json.dumps(result, indent=2) + "\n")
    if not quiet:
        print(f"Wrote {path}", file=sys.stderr, flush=True)


def link_packages(folder: Path) -> None:
    """Measure this checkout, installed or not: link its folders under the names that they have when installed."""
    for name, source in (("bpc_calib", "bpc_calib"), ("bpc_artifacts", "artifacts"), ("bpc_cli", "cli")):
        (folder / name).symlink_to(ROOT / source)
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    about = folder / "bpc_calib-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bpc-calib\nVersion: {found[1] if found else 0}\n")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def sources() -> str:
    """A hash of the measured code: a checkout that is not a repository has no commit."""
    digest = hashlib.sha256()
    for folder in ("artifacts", "bpc_calib"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown: one line of heads, one line per row."""
    lines = (f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows))
    return "\n".join([next(lines), "|---" * len(heads) + "|", *lines])


def filled(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table without the columns in which no row has anything: older results lack a figure."""
    places = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    return table([heads[place] for place in places], [[row[place] for place in places] for row in rows])


def percent(share: float, digits: int = 1) -> str:
    """A share as a number of percent, without the sign; halves are rounded up, as readers expect."""
    return f"{math.floor(100 * share * 10**digits + 0.5) / 10**digits:.{digits}f}"


def link(name: str) -> str:
    """A link to a result, for a page in docs/."""
    return f"[{name}.json](../benchmarks/results/{name}.json)"
