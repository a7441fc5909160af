"""The named corpora. The import of this file is cheap, so that the command line can list them in its help."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpc_calib.text import made_text

__all__ = ["DEFAULT_CORPORA", "DEMO", "DEMO_CORPORA", "HUB_CORPORA", "Corpus", "expand"]


@dataclass(frozen=True)
class Corpus:
    """A source of text. `repo` is set for the Hub, `files` for local text, `style` for generated text."""

    name: str
    path: str  # recorded in the artifact: a Hub path, or the base name of a local path
    field: str  # the text field of JSON and parquet; plain text ignores it
    repo: str | None = None
    revision: str | None = None
    split: str | None = None
    data_file: str | None = None
    files: tuple[Path, ...] = ()
    style: str | None = None


_AUTHORS = "namespace-Pt/long-llm-data"  # the data of the paper's authors

HUB_CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("pg19", "emozilla/pg19", "text", repo="emozilla/pg19", split="train"),
        Corpus(
            "proofpile",
            "hoskinson-center/proof-pile/test/proofpile_test.jsonl.gz",
            "text",
            repo="hoskinson-center/proof-pile",
            revision="490b980249446f2f3bd2df3a8cf085d0f2de240a",
            split="train",
            data_file="test/proofpile_test.jsonl.gz",
        ),
        Corpus(
            "codeparrot",
            "codeparrot/codeparrot-clean-valid",
            "content",
            repo="codeparrot/codeparrot-clean-valid",
            split="train",
        ),
        Corpus(
            "proofpile-parquet",
            "emozilla/proofpile-test-tokenized-mistral",
            "text",
            repo="emozilla/proofpile-test-tokenized-mistral",
            split="train",
        ),
        *(
            Corpus(
                f"authors-{name}",
                f"{_AUTHORS}/lm/{file}",
                "text",
                repo=_AUTHORS,
                revision="48e96d937d87395c9223caf467ad30ae8e525191",
                split="train",
                data_file=f"lm/{file}",
            )
            for name, file in (
                ("pg19", "pg19.json"),
                ("proofpile", "proof-pile.json"),
                ("codeparrot", "codeparrot.json"),
            )
        ),
    )
}
DEMO = "demo"  # short for all of DEMO_CORPORA
DEFAULT_CORPORA = ("pg19", "proofpile", "codeparrot")
# Generated text, similar to the three default corpora, with facts and questions; the demo model was trained on it.
DEMO_CORPORA = {
    corpus.name: corpus
    for corpus in (Corpus(f"demo-{style}", f"demo/{style}", "text", style=style) for style in made_text.STYLES)
}


def expand(specs: Iterable[Any]) -> list[Any]:
    """Return the corpora, with `demo` replaced by the three corpora of `DEMO_CORPORA`."""
    return [name for spec in specs for name in (DEMO_CORPORA if spec == DEMO else (spec,))]
