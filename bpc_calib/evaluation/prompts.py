"""A problem hidden in text: exactly so many tokens of any tokenizer."""

import random
from dataclasses import dataclass
from typing import Any

from bpc_calib.errors import InputError
from bpc_calib.evaluation.tasks import Problem
from bpc_calib.text.made_text import filler
from bpc_calib.text.samples import beginning

__all__ = ["Prompt", "count_answer", "hide"]

OPENING = 32  # tokens of filler at least before all else: room for tokens that form between sentences


@dataclass(frozen=True)
class Prompt:
    """`ids` are context and question, of which the last `question` tokens ask; `answer` tokens hold the answer."""

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
    """Put the statements of a problem into made text, its question at the end.

    Args:
        tokens: of context and question together, with the tokenizer's BOS.
        depth: where the first statement stands, 0 is the beginning and 1 the end of the text; the others, and this
            one too where it is None, stand by chance. Statements keep their order unless a depth is given.
        style: of the text, one of `made_text.STYLES`; all of them, mixed, if None.

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
        raise InputError(f"{tokens:,} tokens are too few: the question and what it asks for take {tokens - left:,}")
    source = filler(rng, style)
    sentences: list[str] = []
    # A text has fewer tokens than its sentences have one by one: counted again until it is nearly full.
    known = -1
    while known < len(sentences):
        known, taken = len(sentences), 0
        while (taken := taken + len(encode(sentence := next(source)))) <= left:
            sentences.append(sentence)
        left = room - len(encode("".join([*sentences, *problem.statements])))
    places = sorted(rng.randrange(len(sentences) + 1) for _ in problem.statements)
    if depth is not None:
        rng.shuffle(places)
        places[0] = round(depth * len(sentences))
    # From the end, so that the places before stay what they are.
    hidden = sorted(zip(places, problem.statements, strict=True), key=lambda at: at[0])
    for place, statement in reversed(hidden):
        sentences.insert(place, statement)
    text = encode("".join(sentences))
    # The gap is filled by the end of more filler: no statement is ever cut.
    gap, before = room + OPENING - len(text), ""
    while len(opening := encode(before)) < gap:
        before += next(source)
    text = opening[len(opening) - gap :] + text
    return Prompt(problem, [*start, *text, *question], len(question), count_answer(problem, tokenizer))


def count_answer(problem: Problem, tokenizer: Any) -> int:
    """Tokens that hold the answer, and one more; twice as many for lists, which may be given in other words."""
    count = len(tokenizer(problem.answer, add_special_tokens=False)["input_ids"])
    return (count if len(problem.wanted) == 1 else 2 * count) + 1
