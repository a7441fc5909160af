"""Turn text into samples: pieces of many documents, packed into sequences of a fixed number of tokens."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bpc_calib.errors import CorpusError, ModelError
from bpc_calib.text.corpora import documents
from bpc_calib.text.known_corpora import Corpus

__all__ = [
    "beginning", "check_vocabulary", "draw_corpus", "draw_samples", "pack", "pieces", "samples_by_corpus", "source",
    "spread",
]  # fmt: skip

CHARACTERS_PER_TOKEN = 6  # higher than in real text, so that most pieces fill a sample
SPARE_CHARACTERS = 64 << 20  # limit of the second and later pieces of documents that are kept in memory


def draw_samples(
    corpora: list[Corpus],
    tokenizer: Any,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    vocab_size: int,
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Draw token sequences, evenly from each corpus, and the `sources` of the artifact's metadata.

    Every sample is full: there is no padding. The same seed returns the same tokens.

    Args:
        corpora: where the text is read.
        tokenizer: the tokenizer of the model.
        samples: sequences in total.
        sequence_length: tokens of each sequence.
        seed: of the draw.
        vocab_size: tokens that the model knows.

    Returns:
        int64 `[samples, sequence_length]`, and one table per corpus; its `sha256` is the hash of the token ids in
        order, as little-endian int32.

    Raises:
        CorpusError: a corpus has too little text for its samples; the message has their number.
        ModelError: the tokenizer does not belong to the model.
    """
    drawn, sources = [], []
    for corpus, wanted in zip(corpora, samples_by_corpus(samples, len(corpora)), strict=True):
        if wanted:
            tokens = draw_corpus(corpus, tokenizer, samples=wanted, sequence_length=sequence_length, seed=seed)
            check_vocabulary(tokens, vocab_size)
            drawn.append(tokens)
            sources.append(source(corpus, tokens))
    return torch.cat(drawn).to(torch.int64), sources


def samples_by_corpus(samples: int, corpora: int) -> list[int]:
    """Return the number of samples of each corpus: equal, or one more for the first ones."""
    return [samples // corpora + (place < samples % corpora) for place in range(corpora)]


def draw_corpus(
    corpus: Corpus,
    tokenizer: Any,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """Draw the samples of one corpus: int32 `[samples, sequence_length]`.

    Args:
        corpus: where the text is read.
        tokenizer: the tokenizer of the model.
        samples: sequences.
        sequence_length: tokens of each sequence.
        seed: of the draw, which also depends on the name of the corpus.
        progress: called with the number of samples so far.

    Raises:
        CorpusError: the corpus has too little text; the message has the number of its samples.
    """
    name = corpus.name.encode("utf-8", "replace").decode()  # of a file, which may not be UTF-8
    rng = random.Random(f"{seed}/text/{name}")
    texts = pieces(documents(corpus, rng), sequence_length * CHARACTERS_PER_TOKEN, rng, mix=2 * samples)
    texts = spread(texts, tokenizer, sequence_length, rng)
    taken: list[Tensor] = []
    for sample in islice(pack(texts, tokenizer, sequence_length), samples):
        taken.append(torch.tensor(sample, dtype=torch.int32))
        progress(len(taken))
    if len(taken) < samples:
        most = f"--samples {len(taken)} per corpus at most, " if taken else ""
        raise CorpusError(
            f"corpus {corpus.name} has text for {len(taken)} of {samples} samples of {sequence_length} tokens: "
            f"use fewer or shorter samples, or add text ({most}--sequence-length for shorter ones)"
        )
    return torch.stack(taken)


def source(corpus: Corpus, tokens: Tensor) -> dict[str, Any]:
    """Return the table of a corpus in the artifact's metadata, for its samples: int32 `[samples, T]`."""
    return {
        "name": corpus.name,
        "path": corpus.path,
        "revision": corpus.revision,
        "split": corpus.split,
        "field": corpus.field,
        "samples": len(tokens),
        "tokens": tokens.numel(),
        "sha256": hashlib.sha256(tokens.numpy().astype("<i4").tobytes()).hexdigest(),
    }


def check_vocabulary(tokens: Tensor, vocab_size: int) -> None:
    """Raise `ModelError` if a tokenizer that returned `tokens [samples, length]` does not belong to the model."""
    if (last := int(tokens.max())) >= vocab_size:
        raise ModelError(
            f"the tokenizer returns token {last}, but the model has only {vocab_size} tokens: "
            "use the model's own tokenizer"
        )


def pieces(texts: Iterable[str], length: int, rng: random.Random, *, mix: int) -> Iterator[str]:
    """Yield one piece of each text, mixed in a buffer, then all other pieces.

    So even a few samples come from many documents, and a small corpus is still used completely.

    Args:
        texts: documents.
        length: characters of a piece, at most.
        rng: draws the piece of each text, and the order.
        mix: pieces in the buffer.
    """
    waiting: list[str] = []
    spare: list[str] = []
    room = SPARE_CHARACTERS
    for text in texts:
        cut = [text[start : start + length] for start in range(0, len(text), length)]
        waiting.append(cut.pop(rng.randrange(len(cut))))
        for piece in cut:
            room -= len(piece)
            if room >= 0:
                spare.append(piece)
        if len(waiting) > mix:
            yield waiting.pop(rng.randrange(len(waiting)))
    for rest in (waiting, spare):
        rng.shuffle(rest)
        yield from rest


def spread(texts: Iterable[str], tokenizer: Any, length: int, rng: random.Random) -> Iterator[str]:
    """Yield texts, but of one that would fill several samples of `length` tokens first a part that fills one.

    The other parts come last. A table of contents and Chinese have few characters per token: without this, a few
    samples would all come from one such piece.
    """
    later: list[str] = []
    for text in texts:
        tokens = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        size = len(text) // max(1, tokens // length) + 1
        yield text[:size]
        later += [text[start : start + size] for start in range(size, len(text), size)]
    rng.shuffle(later)
    yield from later


def beginning(tokenizer: Any) -> list[int]:
    """Return the tokenizer's BOS as a list, or an empty list if the tokenizer does not add BOS to a text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else []


def pack(texts: Iterable[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Yield token sequences of exactly `length`: BOS if the tokenizer adds it, then texts joined by EOS.

    The tokens left at the end are too few for a sample and are dropped.

    Raises:
        CorpusError: `length` has no room for text.
    """
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    start = beginning(tokenizer)
    room = length - len(start)
    if room < 1:
        raise CorpusError(f"samples of {length} tokens have no room for text")
    tokens: list[int] = []
    for text in texts:
        if tokens and eos is not None:
            tokens.append(eos)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # Text may contain the padding token's name, but padding must never become a key.
        tokens += ids if pad is None or pad == eos else [token for token in ids if token != pad]
        used = 0
        while len(tokens) - used >= room:
            yield start + tokens[used : used + room]
            used += room
        del tokens[:used]
