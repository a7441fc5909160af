"""The text of a run: drawn once, the same when the run goes on, and tried beforehand where it may be too short."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.stored import read_intact, read_tensors, read_whole, write_tensors
from bpc_calib.calibration.work_folder import WorkFolder, check_same
from bpc_calib.errors import WorkError
from bpc_calib.text.corpora import pin
from bpc_calib.text.known_corpora import Corpus
from bpc_calib.text.samples import CHARACTERS_PER_TOKEN, check_vocabulary, draw_corpus, samples_by_corpus, source

__all__ = ["read_text", "stored_text", "try_text"]

TRIED = 16 << 20  # bytes of the files of a corpus that are read without need, at most


def try_text(corpora: Sequence[Corpus], open_tokenizer: Callable[[], Any], plan: Plan) -> list[str]:
    """Draw the samples of files that may have too few, as `read_text` will; return the names of what was not read.

    These are corpora of the Hub, and files so large that they probably have enough.

    Args:
        corpora: where the text is read.
        open_tokenizer: returns the tokenizer of the model; called if some text is read.
        plan: says how many samples of how many tokens.

    Raises:
        CorpusError: a text cannot be read, or is too short.
        ModelError: the tokenizer does not belong to the model.
    """
    unread, short = [], []
    for corpus, wanted in zip(corpora, samples_by_corpus(plan.samples, len(corpora)), strict=True):
        enough = min(TRIED, wanted * plan.sequence_length * CHARACTERS_PER_TOKEN)
        if corpus.repo or sum(file.stat().st_size for file in corpus.files) >= enough:
            unread.append(corpus.name)
        elif corpus.files:
            short.append((corpus, wanted))
    tokenizer = open_tokenizer() if short else None
    for corpus, wanted in short:
        length = plan.sequence_length
        drawn = draw_corpus(corpus, tokenizer, samples=wanted, sequence_length=length, seed=plan.seed)
        check_vocabulary(drawn, plan.model.vocab_size)
    return unread


def read_text(
    corpora: Sequence[Corpus], tokenizer: Any, work: WorkFolder, progress: Callable[[str, int, int], None]
) -> Tensor:
    """Draw the samples of each corpus, or take those of the Hub from the work folder: int32 `[samples, T]`.

    Their sources are noted in its journal, and get into the artifact.

    Text of the Hub that the work folder has is at the same commit as before, and needs no network.

    Args:
        corpora: where the text is read.
        tokenizer: the tokenizer of the model.
        work: the work folder, whose plan says how many samples of how many tokens.
        progress: as in `calibrate`, with the stage "text".

    Raises:
        CorpusError: a text cannot be read, or is too short.
        ModelError: the tokenizer does not belong to the model.
        WorkError: the text is not that of the work folder.
    """
    plan = work.plan
    tokens: list[Tensor] = []
    progress("text", 0, plan.samples)
    for place, (corpus, wanted) in enumerate(zip(corpora, samples_by_corpus(plan.samples, len(corpora)), strict=True)):
        if not wanted:
            continue
        before = sum(map(len, tokens))

        def show(done: int, before: int = before) -> None:
            progress("text", before + done, plan.samples)

        stored = _file(work, place)
        noted = work.journal.sources[place] if place < len(work.journal.sources) else None
        if corpus.repo and corpus.revision is None:
            corpus = replace(corpus, revision=noted["revision"]) if noted else pin(corpus)
        kept = {place: stored} if corpus.repo and noted else {}
        drawn = read_intact(kept, lambda path: read_whole(path, {"tokens"})["tokens"].clone()).get(place)
        if drawn is None:
            drawn = draw_corpus(
                corpus,
                tokenizer,
                samples=wanted,
                sequence_length=plan.sequence_length,
                seed=plan.seed,
                progress=show,
            )
        else:
            show(wanted)
        check_vocabulary(drawn, plan.model.vocab_size)
        found = source(corpus, drawn)
        if noted is not None:
            _check_text(work.path, noted, found)
        if (corpus.repo and noted is None) or work.ranks.count > 1:
            write_tensors(stored, {"tokens": drawn})
        if noted is None:
            work.note(replace(work.journal, sources=[*work.journal.sources, found]))
        tokens.append(drawn)
    return torch.cat(tokens)


def stored_text(work: WorkFolder) -> Tensor:
    """Return the tokens that rank 0 has read for all ranks: int32 `[samples, sequence_length]`.

    Raises:
        WorkError: a file is damaged.
    """
    return torch.cat([read_tensors(_file(work, place))["tokens"] for place in range(len(work.journal.sources))])


def _file(work: WorkFolder, place: int) -> Path:
    return work.path / "text" / f"{place}.safetensors"


def _check_text(folder: Path, noted: dict[str, Any], found: dict[str, Any]) -> None:
    name = found["name"]
    changed = {"sha256"} == {key for key in found if found[key] != noted.get(key)}
    if changed:
        raise WorkError(
            f"{folder} has the work of another text: corpus {name} has changed since; "
            "restore it, choose another --work-dir, or delete the folder"
        )
    check_same(folder, {f"corpus {name}": noted}, {f"corpus {name}": found})
