"""The models that `real_suite.py` measures, where their files are, and which text they read."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import real_models

__all__ = ["KINDS", "PROJECTIONS", "SIDES", "Subject", "digests", "subjects"]

KINDS = ("prose", "code")
SIDES = ("calibration", "held-out")
# Tokens per prompt. SmolLM2's limit is 8,192.
LENGTHS = {"SmolLM2-135M-Instruct": (2048, 8192), "gemma-3-270m": (2048, 8192, 16384)}
TINY_LENGTHS = (256, 512)
# The options of `bpc calibrate` that make each artifact, the default first.
PROJECTIONS = {"bpc": (), "bpc-product": ("--codes", "product"), "paper": ("--method", "paper")}


@dataclass(frozen=True)
class Subject:
    """One model with its files."""

    name: str
    model: str  # a folder, or `demo`
    gguf: Path | None  # quantised, as downloaded
    lengths: tuple[int, ...]
    folder: Path  # holds text, artifacts and intermediate files
    tiny: bool

    def corpora(self, side: str) -> list[str]:
        """The text of `calibration` or `held-out`, as `--corpus` takes it."""
        if self.tiny:
            return ["demo-prose", "demo-code"]
        return [f"{kind}={self.folder / 'text' / side / kind}" for kind in KINDS]

    def takes(self, part: str) -> bool:
        """Whether a part measures this model: `decode` takes tokens back, which sliding-window layers cannot."""
        return part != "decode" or not self.name.startswith("gemma")

    def artifact(self, projections: str) -> Path:
        """The file with these projections."""
        return self.folder / f"{self.name}-{projections}.safetensors"


def subjects(folder: Path, *, tiny: bool) -> list[Subject]:
    """All models, with their files below `folder`; `tiny`: the bundled model alone."""
    if tiny:
        return [Subject("demo", "demo", None, TINY_LENGTHS, folder, tiny)]
    return [
        Subject(source.name, str(folder / source.name), folder / source.file, LENGTHS[source.name], folder, tiny)
        for source in real_models.SOURCES
    ]


def digests(subject: Subject) -> dict[str, str]:
    """Hashes of the model's files, the text, and the artifacts that are there; part of what a result depends on."""
    found = {"model": _digest(Path(subject.model)), "text": _digest(subject.folder / "text")}
    files = sorted(subject.folder.glob(f"{subject.name}-*.safetensors"))
    return found | {path.name: _digest(path) for path in files}


def _digest(place: Path) -> str:
    """A hash of a file, or of the names and contents of the files of a folder."""
    digest = hashlib.sha256()
    for path in [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(place)}\n{real_models.digest(path)}\n".encode())
    return digest.hexdigest()[:16]
