"""Questions with answers in a long text: needles, and the tasks of RULER that need no external data.

A `Problem` holds the statements to hide in a text and the question after it; it does not depend on a tokenizer or a
length.
RULER: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from bpc_calib.text import made_text
from bpc_calib.text.made_text import ATTRIBUTES, fact, question

__all__ = ["RULER", "TASKS", "TEXT", "Problem", "score"]

TEXT = "text"  # the task without a question: plain text


@dataclass(frozen=True)
class Problem:
    """A question about hidden statements.

    The text contains `statements` in this order, at any places. `question` follows the text, and `answer` follows the
    question. `wanted` holds the parts of the answer that count for the score.
    """

    statements: tuple[str, ...]
    question: str
    answer: str
    wanted: tuple[str, ...]


def score(problem: Problem, said: str) -> float:
    """Return the share of the wanted parts that `said` contains, as in RULER."""
    return sum(part in said for part in problem.wanted) / len(problem.wanted)


def needle(rng: random.Random, held_out: bool = True, *, facts: int = 8) -> Problem:
    """Return a problem with `facts` facts about names without a common word; the question is about the first fact."""
    return _one_of(rng, _names(rng, facts, held_out))


def single(rng: random.Random, held_out: bool = True) -> Problem:
    """Return a problem with one fact (RULER: niah_single)."""
    return needle(rng, held_out, facts=1)


def multi_key(rng: random.Random, held_out: bool = True) -> Problem:
    """Return a problem with 16 facts whose names share words, so that one word of a name is not enough (niah_multikey).

    The question is about the first fact of the statements.
    """
    words: dict[str, None] = {}
    while len(words) < 16:
        first, second = rng.sample(made_text.FIRST, 16), rng.sample(made_text.SECOND, 8)
        names = [f"{a} {b}" for a in first for b in second]
        words = dict.fromkeys(name for name in names if made_text.is_held_out(name) == held_out)
    return _one_of(rng, rng.sample(list(words), 16))


def multi_value(rng: random.Random, held_out: bool = True, *, values: int = 4) -> Problem:
    """Return a problem with several values for each of two names; the question is about all values of one name.

    RULER: niah_multivalue.
    """
    attribute, (target, other) = rng.choice(ATTRIBUTES), _names(rng, 2, held_out)
    wanted, others = _numbers(rng, values), _numbers(rng, values)
    statements = [f" One {attribute} of {target} is {value}." for value in wanted]
    for value in others:
        statements.insert(rng.randrange(len(statements) + 1), f" One {attribute} of {other} is {value}.")
    question_text = f" What are the {attribute}s of {target}? The {attribute}s of {target} are"
    return Problem(tuple(statements), question_text, f" {', '.join(wanted)}.", tuple(wanted))


def multi_query(rng: random.Random, held_out: bool = True, *, asked: int = 4) -> Problem:
    """Return a problem with eight facts; the question is about `asked` of them at once (niah_multiquery)."""
    attribute, names = rng.choice(ATTRIBUTES), _names(rng, 8, held_out)
    values = _numbers(rng, 8)
    facts = [fact(attribute, name, value) for name, value in zip(names, values, strict=True)]
    start = f" The {attribute} of"
    question_text = f" What are the {attribute}s of {', '.join(names[: asked - 1])} and {names[asked - 1]}?{start}"
    answer = "".join(facts[:asked]).removeprefix(start)
    rng.shuffle(facts)
    return Problem(tuple(facts), question_text, answer, tuple(values[:asked]))


def tracking(rng: random.Random, held_out: bool = True, *, hops: int = 3) -> Problem:
    """Return a problem with two chains of variables, where each variable has the value of the previous one.

    The question is about all variables of one chain (RULER: variable tracking).
    """
    variables = rng.sample(made_text.SECOND, 2 * (hops + 1))
    value, other = _numbers(rng, 2)
    chains = [variables[: hops + 1], variables[hops + 1 :]]
    lines = []
    for chain, start in zip(chains, (value, other), strict=True):
        sources = [start, *(f"VAR {variable}" for variable in chain)]
        lines.append([f" VAR {variable} = {source}." for variable, source in zip(chain, sources, strict=False)])
    statements: list[str] = []
    while lines := [line for line in lines if line]:
        statements.append(rng.choice(lines).pop(0))
    question_text = f" Which variables have the value {value}? They are"
    return Problem(tuple(statements), question_text, f" {', '.join(chains[0])}.", tuple(chains[0]))


def common_words(rng: random.Random, held_out: bool = True, *, common: int = 5, uncommon: int = 25) -> Problem:
    """Return a problem with lists of words; the question is about the words that occur ten times (RULER: common words).

    The other words occur once.
    """
    drawn = rng.sample(made_text.words(), common + uncommon)
    listed = drawn[:common] * 10 + drawn[common:]
    rng.shuffle(listed)
    return _lists(listed, sorted(drawn[:common], key=listed.index))


def frequent_words(rng: random.Random, held_out: bool = True, *, count: int = 100) -> Problem:
    """Return a problem with lists of words; the question is about the three most frequent words.

    The n-th word occurs 1 / n^2 times as often as the first word (RULER: frequent words).
    """
    drawn = rng.sample(made_text.words(), 24)
    listed = [word for place, word in enumerate(drawn, start=1) for _ in range(max(1, round(count / place**2)))]
    rng.shuffle(listed)
    return _lists(listed, drawn[:3])


TASKS: dict[str, Callable[..., Problem]] = {
    "needle": needle,
    "single": single,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "multi-query": multi_query,
    "tracking": tracking,
    "common-words": common_words,
    "frequent-words": frequent_words,
}
RULER = tuple(name for name in TASKS if name != "needle")


def _names(rng: random.Random, count: int, held_out: bool) -> list[str]:
    """Return names without a common word."""
    names: list[str] = []
    words: set[str] = set()
    while len(names) < count:
        made = made_text.name(rng, held_out=held_out)
        if words.isdisjoint(made.split()):
            names.append(made)
            words.update(made.split())
    return names


def _numbers(rng: random.Random, count: int) -> list[str]:
    """Return different numbers."""
    numbers: dict[str, None] = {}
    while len(numbers) < count:
        numbers[made_text.number(rng)] = None
    return list(numbers)


def _one_of(rng: random.Random, names: list[str]) -> Problem:
    attributes = [rng.choice(ATTRIBUTES) for _ in names]
    values = _numbers(rng, len(names))
    statements = map(fact, attributes, names, values)
    return Problem(tuple(statements), question(attributes[0], names[0]), f" {values[0]}.", (values[0],))


def _lists(listed: list[str], wanted: list[str]) -> Problem:
    statements = [f" Words: {', '.join(listed[i : i + 10])}." for i in range(0, len(listed), 10)]
    question_text = f" The {len(wanted)} most common words are"
    return Problem(tuple(statements), question_text, f" {', '.join(wanted)}.", tuple(wanted))
