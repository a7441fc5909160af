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


def _on_hub(
    name: str, repo: str, *, field: str = "text", file: str | None = None, revision: str | None = None
) -> Corpus:
    path = repo if file is None else f"{repo}/{file}"
    return Corpus(name, path, field, repo=repo, revision=revision, split="train", data_file=file)


_AUTHORS = "namespace-Pt/long-llm-data"  # the data of the paper's authors
_AT = "48e96d937d87395c9223caf467ad30ae8e525191"

HUB_CORPORA = {
    corpus.name: corpus
    for corpus in (
        _on_hub("pg19", "emozilla/pg19"),
        _on_hub(
            "proofpile",
            "hoskinson-center/proof-pile",
            file="test/proofpile_test.jsonl.gz",
            revision="490b980249446f2f3bd2df3a8cf085d0f2de240a",
        ),
        _on_hub("codeparrot", "codeparrot/codeparrot-clean-valid", field="content"),
        _on_hub("proofpile-parquet", "emozilla/proofpile-test-tokenized-mistral"),
        _on_hub("authors-pg19", _AUTHORS, file="lm/pg19.json", revision=_AT),
        _on_hub("authors-proofpile", _AUTHORS, file="lm/proof-pile.json", revision=_AT),
        _on_hub("authors-codeparrot", _AUTHORS, file="lm/codeparrot.json", revision=_AT),
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
