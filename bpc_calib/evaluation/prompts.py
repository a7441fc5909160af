"""Hide a problem in made text, so that the prompt has an exact number of tokens with any tokenizer."""

import random
from dataclasses import dataclass
from typing import Any

from bpc_calib.errors import InputError
from bpc_calib.evaluation.tasks import Problem
from bpc_calib.text.made_text import filler
from bpc_calib.text.samples import beginning

__all__ = ["Prompt", "count_answer", "hide"]

OPENING = 32  # minimum tokens of filler at the beginning: room for tokens that form across sentence borders


@dataclass(frozen=True)
class Prompt:
    """A prompt: `ids` is context and question, `question` the tokens of the question, `answer` those to decode."""

    problem: Problem
    ids: list[int]
    question: int
    answer: int


def hide(
    problem: Problem,
    tokenizer: Any,
    tokens: int,
    rng: random.Random,
    depth: float | None = None,
    *,
    style: str | None = None,
) -> Prompt:
    """Put the statements of a problem into made text, and its question at the end.

    Args:
        tokens: number of tokens of context and question together, including the tokenizer's BOS.
        depth: position of the first statement, from 0 (beginning of the text) to 1 (end). All other statements are at
            random positions, and None makes the first random too. Statements keep their order only if it is None.
        style: style of the text, one of `made_text.STYLES`; None: a mix of all.

    Raises:
        InputError: the problem needs more tokens.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    start = beginning(tokenizer)
    question = encode(problem.question)
    room = tokens - len(start) - len(question) - OPENING
    left = room - sum(len(encode(statement)) for statement in problem.statements)
    if left < 0:
        raise InputError(f"{tokens:,} tokens are too few: the question and its statements need {tokens - left:,}")
    source = filler(rng, style)
    sentences: list[str] = []
    # A joined text has fewer tokens than its sentences one by one, so count the text again until it is nearly full.
    before_round = -1
    while before_round < len(sentences):
        before_round, taken = len(sentences), 0
        while (taken := taken + len(encode(sentence := next(source)))) <= left:
            sentences.append(sentence)
        left = room - len(encode("".join([*sentences, *problem.statements])))
    places = sorted(rng.randrange(len(sentences) + 1) for _ in problem.statements)
    if depth is not None:
        rng.shuffle(places)
        places[0] = round(depth * len(sentences))
    # Insert from the end, so that earlier positions stay valid.
    hidden = sorted(zip(places, problem.statements, strict=True), key=lambda at: at[0])
    for place, statement in reversed(hidden):
        sentences.insert(place, statement)
    text = encode("".join(sentences))
    # More filler at the beginning fills the gap and is cut at its start, so no statement is ever cut.
    gap, before = room + OPENING - len(text), ""
    while len(opening := encode(before)) < gap:
        before += next(source)
    text = opening[len(opening) - gap :] + text
    return Prompt(problem, [*start, *text, *question], len(question), count_answer(problem, tokenizer))


def count_answer(problem: Problem, tokenizer: Any) -> int:
    """Return the tokens to decode for an answer: its length plus one, twice its length for a list in free wording."""
    count = len(tokenizer(problem.answer, add_special_tokens=False)["input_ids"])
    return (count if len(problem.wanted) == 1 else 2 * count) + 1
