"""Questions about lists of words: which words occur most often? The answer depends on the whole list."""

import random

from bpc_calib.evaluation.problem import Problem
from bpc_calib.text import made_text

__all__ = ["common_words", "frequent_words"]

UNCOMMON = 25  # other words in a list of common words
FREQUENT = 24  # words in a list of frequent words
PER_LINE = 10


def common_words(rng: random.Random, held_out: bool = True, *, size: int = 75, common: int = 5) -> Problem:
    """Return a problem with a list of `size` words; the question is about the words that occur ten times as often.

    RULER: common words.
    """
    drawn = rng.sample(made_text.words(), common + UNCOMMON)
    listed = drawn[:common] * (10 * size // (10 * common + UNCOMMON))
    others = size - len(listed)
    listed += (drawn[common:] * (others // UNCOMMON + 1))[:others]
    rng.shuffle(listed)
    return _lists(listed, sorted(drawn[:common], key=listed.index))


def frequent_words(rng: random.Random, held_out: bool = True, *, size: int = 100) -> Problem:
    """Return a problem with a list of words; the question is about the three most frequent words.

    The first word occurs `size` times, and the n-th word 1 / n^2 times as often (RULER: frequent words).
    """
    drawn = rng.sample(made_text.words(), FREQUENT)
    listed = [word for place, word in enumerate(drawn, start=1) for _ in range(max(1, round(size / place**2)))]
    rng.shuffle(listed)
    return _lists(listed, drawn[:3])


def _lists(listed: list[str], wanted: list[str]) -> Problem:
    lines = [listed[first : first + PER_LINE] for first in range(0, len(listed), PER_LINE)]
    return Problem(
        statements=tuple(f" Words: {', '.join(line)}." for line in lines),
        question=" Which words are the most common?",
        start=f" The {len(wanted)} most common words are",
        answer=f" {', '.join(wanted)}.",
        wanted=tuple(wanted),
    )
