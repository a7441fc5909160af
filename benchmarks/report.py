"""What every benchmark shares: its arguments, and the JSON that it writes."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bpc_calib.bench.machine import machine, without_folder

__all__ = ["machine", "make_parser", "parse", "progress", "settings", "without_folder", "write"]


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


def progress(share: float, what: str) -> None:
    """Show the finished share on one line of stderr, as `evaluate` calls it."""
    print(f"\r{share:6.1%} {what}    ", end="\n" if share == 1 else "", file=sys.stderr, flush=True)


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write `result` with the command, the machine, the versions and the commit as JSON.

    Paths in the command lose their folders.
    """
    if path is None:
        return
    words = [without_folder(word) for word in sys.argv]
    document = {"command": " ".join(["python", *words]), "machine": machine(), **result}
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"Wrote {path}", file=sys.stderr)
