"""Get real text for calibration and for evaluation: handbooks from Debian's packages, and Python's standard library.

python benchmarks/real_text.py

Writes calibration/prose, calibration/code, held-out/prose and held-out/code. A hash of its name puts each file, whole,
on one side: nothing that is evaluated was calibrated on. Needs apt-get and dpkg.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("debian-handbook", "git-doc", "perl-doc")
PAGES = (  # folders of the packages, and what is text in them
    ("usr/share/doc/debian-handbook/html/en-US", "*.html"),
    ("usr/share/doc/git-doc", "**/*.html"),
    ("usr/share/perl", "*/pod/*.pod"),
)
NO_TEXT = {"index.html", "ix01.html", "perltoc.pod"}  # lists of the other pages
# Tables, tests, and what is not of the library.
NO_CODE = {"__pycache__", "encodings", "pydoc_data", "site-packages", "dist-packages", "test", "tests"}
LEAST = 2000  # characters; a shorter file is a stub
HELD_OUT = 4  # one file in this many is held out

BLOCKS = frozenset("p div h1 h2 h3 h4 h5 h6 li dt dd tr table pre ul ol dl br hr blockquote".split())
HIDDEN = frozenset("head script style nav".split())


class _Text(HTMLParser):
    """Collect the visible text of a page; several spaces and ends of lines are one space, but in `pre`."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.hidden = self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in HIDDEN
        self.preformatted += tag == "pre"
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in HIDDEN
        self.preformatted -= tag == "pre"
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self.hidden:
            return
        if not self.preformatted:
            data = re.sub(r"\s+", " ", data)
            if not self.pieces or self.pieces[-1].endswith("\n"):
                data = data.lstrip()
        self.pieces.append(data)


def html_to_text(page: str) -> str:
    """The visible text of an HTML page, with an empty line between its paragraphs."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    lines = "".join(parser.pieces).replace("\xa0", " ").splitlines()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip() + "\n"


def side(name: str) -> str:
    """The side of the file with this name: `calibration`, or for one file in four `held-out`."""
    return "held-out" if int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT == 0 else "calibration"


def prose(packages: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the pages of unpacked packages."""
    for folder, pattern in PAGES:
        for path in sorted((packages / folder).glob(pattern)):
            if path.name not in NO_TEXT:
                text = path.read_text("utf-8", errors="replace")
                yield path.name + ".txt", html_to_text(text) if path.suffix == ".html" else text


def code(library: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the modules of Python's standard library."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not NO_CODE.intersection(name.parts):
            yield ".".join(name.parts), path.read_text("utf-8", errors="replace")


def write(files: Iterator[tuple[str, str]], kind: str, folder: Path) -> None:
    """Write files that are long enough to FOLDER/SIDE/KIND/NAME."""
    for name, text in files:
        if len(text) >= LEAST:
            path = folder / side(name) / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")


def unpack(packages: tuple[str, ...], folder: Path) -> Path:
    """Download packages of Debian, unpack them below `folder`, and return the root of their files."""
    unpacked = folder / "unpacked"
    subprocess.run(["apt-get", "--quiet", "--quiet", "download", *packages], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, unpacked], check=True)
    return unpacked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "real" / "text", help="where the text goes")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            written = Path(scratch) / "text"
            write(prose(unpack(PACKAGES, Path(scratch))), "prose", written)
            write(code(Path(sysconfig.get_path("stdlib"))), "code", written)
            os.replace(written, folder)
    for path in sorted(folder.glob("*/*")):
        sizes = [file.stat().st_size for file in path.iterdir()]
        print(f"{path}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
