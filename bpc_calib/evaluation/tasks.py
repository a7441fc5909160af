"""The tasks of `bpc eval` by name: questions about facts, words or passages that are hidden in a text or fill it.

A task is a function of a `random.Random` that returns a `Problem`. The tasks of `GROWING` also take a size.
Importing this file is cheap, so the command line lists the tasks in its help.
RULER: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024.
"""

import functools
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from bpc_calib.text import made_text
from bpc_calib.text.made_text import ATTRIBUTES, fact, opening, question

__all__ = ["GROWING", "RULER", "TASKS", "TEXT", "Problem", "needle", "score", "single"]

TEXT = "text"  # the task without a question: plain text
UNCOMMON = 25  # other words in a list of common words
FREQUENT = 24  # words in a list of frequent words
PER_LINE = 10  # words


@dataclass(frozen=True)
class Problem:
    """A question about statements in a text; it does not depend on a tokenizer.

    The text contains `statements` in this order. `question` follows the text. `start` follows the question and begins
    the answer, so that a model without instructions knows what to say; `answer` is its rest. `wanted` holds the parts
    of the answer that count for the score.
    """

    statements: tuple[str, ...]
    question: str
    start: str
    answer: str
    wanted: tuple[str, ...]
    in_order: bool = False  # whether the answer must be the wanted words and nothing else, each at its place


def score(problem: Problem, said: str) -> float:
    """Return the share of the wanted parts that `said` contains, as in RULER; or the share of words at their places."""
    if problem.in_order:
        pairs = zip(problem.wanted, said.split(), strict=False)
        return sum(wanted == word for wanted, word in pairs) / len(problem.wanted)
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
    asked, start = f" What are the {attribute}s of {target}?", f" The {attribute}s of {target} are"
    return Problem(tuple(statements), asked, start, f" {', '.join(wanted)}.", tuple(wanted))


def multi_query(rng: random.Random, held_out: bool = True, *, asked: int = 4) -> Problem:
    """Return a problem with eight facts; the question is about `asked` of them at once (niah_multiquery)."""
    attribute, names = rng.choice(ATTRIBUTES), _names(rng, 8, held_out)
    values = _numbers(rng, 8)
    facts = [fact(attribute, name, value) for name, value in zip(names, values, strict=True)]
    start = f" The {attribute} of"
    question_text = f" What are the {attribute}s of {', '.join(names[: asked - 1])} and {names[asked - 1]}?"
    answer = "".join(facts[:asked]).removeprefix(start)
    rng.shuffle(facts)
    return Problem(tuple(facts), question_text, start, answer, tuple(values[:asked]))


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
    asked, start = f" Which variables have the value {value}?", " They are"
    return Problem(tuple(statements), asked, start, f" {', '.join(chains[0])}.", tuple(chains[0]))


def haystack(rng: random.Random, held_out: bool = True, *, size: int = 64) -> Problem:
    """Return a problem with `size` facts, each about another name or attribute (RULER: niah_multikey_2).

    Made text has 13,824 pairs of names and attributes, so there are never more facts.
    """
    asked = rng.choice(ATTRIBUTES), made_text.name(rng, held_out=held_out)
    drawn = rng.sample(_pairs(), min(size, len(_pairs())))
    pairs = [asked, *(pair for pair in drawn if pair != asked)][: len(drawn)]
    return _one_in_all(rng, [(*pair, made_text.number(rng)) for pair in pairs])


def uuids(rng: random.Random, held_out: bool = True, *, size: int = 16) -> Problem:
    """Return a problem with `size` facts whose names and values are UUIDs (RULER: niah_multikey_3)."""
    attribute = rng.choice(ATTRIBUTES)
    return _one_in_all(rng, [(attribute, _uuid(rng), _uuid(rng)) for _ in range(size)])


def key_values(rng: random.Random, held_out: bool = True, *, size: int = 16) -> Problem:
    """Return a problem with a dictionary of `size` pairs of UUIDs; the question is about the value of one key.

    Liu et al., "Lost in the Middle: How Language Models Use Long Contexts", 2023.
    """
    pairs = [(_uuid(rng), _uuid(rng)) for _ in range(size)]
    key, value = rng.choice(pairs)
    statements = tuple(f'\n"{key}": "{value}",' for key, value in pairs)
    return Problem(statements, f'\nWhat is the value of the key "{key}"?', f'\n"{key}": "', f'{value}"', (value,))


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
    return Problem(tuple(statements), *_ask(attributes[0], names[0], values[0]))


def _one_in_all(rng: random.Random, facts: list[tuple[str, str, str]]) -> Problem:
    """Return a problem with these facts in any order; the question is about the first."""
    asked = facts[0]
    rng.shuffle(facts)
    return Problem(tuple(fact(*each) for each in facts), *_ask(*asked))


def _ask(attribute: str, whose: str, value: str) -> tuple[str, str, str, tuple[str]]:
    """Return question, start, answer and wanted parts of a problem about one fact."""
    return question(attribute, whose), opening(attribute, whose), f" {value}.", (value,)


@functools.cache
def _pairs() -> tuple[tuple[str, str], ...]:
    return tuple((attribute, name) for name in made_text.names() for attribute in ATTRIBUTES)


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def common_words(rng: random.Random, held_out: bool = True, *, size: int = 75, common: int = 5) -> Problem:
    """Return a problem with a list of words; the question is about the words that occur ten times as often.

    RULER: common words.

    Args:
        rng: source of the draws.
        held_out: of no effect, since there are no names.
        size: words of the list.
        common: how many words occur often.
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


def passages(rng: random.Random, held_out: bool = True, *, size: int = 8) -> Problem:
    """Return a problem with `size` passages, each about one name; the answer needs two of them (RULER: QA).

    One passage says who somebody's best friend is, and the passage of this friend says where the friend lives.
    """
    names = rng.sample(made_text.names(), min(size, len(made_text.names())))
    asked = made_text.name(rng, held_out=held_out)
    if asked not in names:
        names[0] = asked
    rng.shuffle(names)
    friends = dict(zip(names, [*names[1:], names[0]], strict=True))
    homes = {name: f"{rng.choice(made_text.ADJECTIVES)} {rng.choice(made_text.PLACES)}" for name in names}
    rng.shuffle(names)
    statements = tuple(
        _passage(rng, number, name, friends[name], homes[name]) for number, name in enumerate(names, start=1)
    )
    home = homes[friends[asked]]
    question = f" Where does the best friend of {asked} live?"
    return Problem(statements, question, f" The best friend of {asked} lives in the", f" {home}.", (home,))


def copying(rng: random.Random, held_out: bool = True, *, size: int = 8, sentences: int = 4) -> Problem:
    """Return a problem with passages of some sentences; one must be repeated word for word.

    Args:
        rng: source of the draws.
        held_out: of no effect, since there are no names.
        size: passages.
        sentences: of a passage.
    """
    texts = ["".join(made_text.prose(rng) for _ in range(sentences)) for _ in range(size)]
    asked = rng.randrange(size)
    statements = tuple(f"\nPassage {number}:{text}" for number, text in enumerate(texts, start=1))
    question, start = f"\nRepeat passage {asked + 1} word for word.", f" Passage {asked + 1}:"
    return Problem(statements, question, start, texts[asked], tuple(texts[asked].split()), in_order=True)


def _passage(rng: random.Random, number: int, name: str, friend: str, home: str) -> str:
    sentences = [
        f" {name} is a {rng.choice(made_text.ADJECTIVES)} {rng.choice(made_text.PEOPLE)}.",
        f" The best friend of {name} is {friend}.",
        f" {name} lives in the {home}.",
        *(made_text.prose(rng) for _ in range(3)),
    ]
    rng.shuffle(sentences)
    return f"\nPassage {number}:{''.join(sentences)}"


TASKS: dict[str, Callable[..., Problem]] = {
    "needle": needle,
    "single": single,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "multi-query": multi_query,
    "tracking": tracking,
    "common-words": common_words,
    "frequent-words": frequent_words,
    "haystack": haystack,
    "uuids": uuids,
    "passages": passages,
    "key-values": key_values,
    "copying": copying,
}
# The tasks whose statements fill the prompt, with the smallest `size` that each takes; a larger size has more tokens.
GROWING = {
    "common-words": 15,
    "frequent-words": 16,
    "haystack": 1,
    "uuids": 1,
    "passages": 2,
    "key-values": 1,
    "copying": 1,
}
RULER = tuple(TASKS)[1:11]
