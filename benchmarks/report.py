"""What the scripts share: the JSON that they write, the packages of this checkout, and tables."""

import argparse
import functools
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

__all__ = [
    "NOTHING", "ROOT", "Lines", "Results", "Row", "about", "by", "keep", "link_packages", "made_by", "make_parser",
    "percent", "sources", "table",
]  # fmt: skip

ROOT = Path(__file__).parent.parent
Results = Mapping[str, Any]  # the committed results by file name, without its suffix
Row = dict[str, Any]
Lines = Iterator[Sequence[object]]  # the heads of a table, and the cells of each line
NOTHING = "Not measured yet: `make real`."


def about() -> dict[str, Any]:
    """The command without the folders of paths, processor, cores, versions and commit."""
    from bpc_calib.bench.machine import machine, without_folder  # late: the suites choose the packages first

    return {"command": " ".join(["python", *map(without_folder, sys.argv)]), "machine": machine()}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of every benchmark that writes a result."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", "-o", type=Path, help="write the result to this file, as JSON")
    parser.add_argument("--tiny", action="store_true", help="check the script itself: the figures mean nothing")
    return parser


def keep(path: Path | None, result: dict[str, Any], *, quiet: bool = False) -> None:
    """Write a whole result as JSON or nothing; without a path nothing."""
    if path is None:
        return
    from bpc_artifacts.replacing import replacing

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


def made_by(*lines: Callable[[Results], Lines], prefix: str = "") -> dict[str, Callable[[Results], str]]:
    """Functions that return a table in Markdown, by the names of those that yield its lines."""
    return {prefix + each.__name__.replace("_", "-"): functools.partial(_made, each) for each in lines}


def _made(lines: Callable[[Results], Lines], results: Results) -> str:
    heads, *rows = lines(results)
    return table(heads, rows) if rows else NOTHING


def table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, without the columns in which no row has anything: older results lack a figure."""
    places = [place for place in range(len(heads)) if any(row[place] != "" for row in rows)]
    cells = ([row[place] for place in places] for row in (heads, *rows))
    texts = ((f"{each:,}" if isinstance(each, int | float) else str(each) for each in line) for line in cells)
    first, *others = (f"| {' | '.join(line)} |" for line in texts)
    return "\n".join([first, "|---" * len(places) + "|", *others])


def by(rows: Iterable[Row], *names: str) -> dict[Any, Row]:
    """The rows by what they have under a name, or by the tuple of what they have under several."""
    return {itemgetter(*names)(row): row for row in rows}


def percent(share: float, digits: int = 1) -> str:
    """A share as a number of percent, without the sign; halves are rounded up, as readers expect."""
    return f"{math.floor(100 * share * 10**digits + 0.5) / 10**digits:.{digits}f}"
