"""Text to samples: pieces of many documents, packed to a fixed number of tokens each."""

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

__all__ = ["beginning", "draw_samples", "pack", "pieces"]

CHARACTERS_PER_TOKEN = 6  # more than text has, so that most pieces fill a sample
SPARE_CHARACTERS = 64 << 20


def draw_samples(
    corpora: list[Corpus],
    tokenizer: Any,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    vocab_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, list[dict[str, Any]]]:
    """`samples` token sequences, evenly from each corpus, and the `sources` table of the artifact.

    Every sample is full: there is no padding. The same seed gives the same tokens.

    Returns:
        int64 `[samples, sequence_length]`, and a table a corpus; `sha256` is over its token ids as
        little-endian int32, in order.

    Raises:
        CorpusError: a corpus has fewer samples than its share; says how many there were.
        ModelError: the tokenizer is not the model's.
    """
    drawn: list[list[int]] = []
    sources = []
    for place, corpus in enumerate(corpora):
        wanted = samples // len(corpora) + (place < samples % len(corpora))
        if not wanted:
            continue
        rng = random.Random(f"{seed}/text/{corpus.name}")
        texts = pieces(documents(corpus, rng), sequence_length * CHARACTERS_PER_TOKEN, rng, mix=2 * wanted)
        own: list[list[int]] = []
        for sample in islice(pack(texts, tokenizer, sequence_length), wanted):
            own.append(sample)
            progress(len(drawn) + len(own))
        if len(own) < wanted:
            raise CorpusError(
                f"corpus {corpus.name} has text for {len(own)} samples of {sequence_length} tokens, "
                f"{wanted} are needed: ask for fewer or shorter ones, or add text"
            )
        drawn += own
        tokens = torch.tensor(own, dtype=torch.int32).numpy()
        sources.append(
            {
                "name": corpus.name,
                "path": corpus.path,
                "revision": corpus.revision,
                "split": corpus.split,
                "field": corpus.field,
                "samples": wanted,
                "tokens": wanted * sequence_length,
                "sha256": hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest(),
            }
        )
    result = torch.tensor(drawn, dtype=torch.int64)
    if int(result.max()) >= vocab_size:
        raise ModelError(
            f"the tokenizer gives token {int(result.max())}, the model knows {vocab_size}: they do not belong together"
        )
    return result, sources


def pieces(texts: Iterable[str], length: int, rng: random.Random, *, mix: int) -> Iterator[str]:
    """One piece of at most `length` characters of each text, mixed in a buffer of `mix`, then the rest.

    So a few samples come from as many documents as there are, and a small corpus is still used whole.
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


def beginning(tokenizer: Any) -> list[int]:
    """The tokenizer's BOS, if it begins every text with it."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else []


def pack(texts: Iterable[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Token sequences of exactly `length`: the tokenizer's BOS if it has one, then texts joined by EOS.

    What is left at the end is too short for a sample and dropped.
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
        own = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # Text may spell the padding token; padding is never a key.
        tokens += own if pad is None or pad == eos else [token for token in own if token != pad]
        used = 0
        while len(tokens) - used >= room:
            yield start + tokens[used : used + room]
            used += room
        del tokens[:used]
