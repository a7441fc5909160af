"""A list of corpora: each text once, each corpus with a share of the samples."""

import os
from collections.abc import Sequence
from pathlib import Path

from bpc_calib.errors import InputError
from bpc_calib.text.corpora import open_corpus
from bpc_calib.text.known_corpora import HUB_CORPORA, Corpus, expand

__all__ = ["check_corpora", "open_corpora"]


def open_corpora(
    specs: Sequence[str | os.PathLike[str] | Corpus], *, text_field: str = "text", hub: bool = True
) -> list[Corpus]:
    """Open corpora, each as `open_corpus` does; `demo` is short for several.

    Without `hub`, corpora of the Hub stay without a commit until `pin`, and no network is needed.

    Raises:
        CorpusError: a corpus cannot be opened.
        InputError: there is none, or two have the same name or share a file.
    """
    if not specs or isinstance(specs, str):
        raise InputError(f"corpora must be a list of at least one corpus, not {specs!r}")
    opened = [
        spec if isinstance(spec, Corpus) else open_corpus(os.fspath(spec), text_field=text_field)
        for spec in (expand(specs) if hub else [HUB_CORPORA.get(spec, spec) for spec in expand(specs)])
    ]
    check_corpora(opened)
    return opened


def check_corpora(corpora: Sequence[Corpus], samples: int | None = None) -> None:
    """Raise `InputError` if two corpora have the same name or share a file, or one gets none of the `samples`.

    A text that is read twice would count twice, and a corpus without samples would be left out without a word.
    """
    names: set[str] = set()
    readers: dict[Path, str] = {}
    for corpus in corpora:
        if corpus.name in names:
            raise InputError(f"corpus {corpus.name} is given twice: leave one out, or name another text with NAME=PATH")
        names.add(corpus.name)
        for file in {file.resolve() for file in corpus.files}:
            if file in readers:
                raise InputError(
                    f"corpora {readers[file]} and {corpus.name} both read {file.name}: give each text once"
                )
            readers[file] = corpus.name
    if samples is not None and samples < len(corpora):
        raise InputError(
            f"{len(corpora)} corpora ({', '.join(c.name for c in corpora)}) need at least {len(corpora)} samples, not "
            f"{samples}: raise the samples, or name fewer corpora"
        )
