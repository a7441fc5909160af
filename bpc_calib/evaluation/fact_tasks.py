"""Questions about facts that are hidden in a text, or that fill it: needles, pairs of keys and values, variables."""

import functools
import random
import uuid

from bpc_calib.evaluation.problem import Problem
from bpc_calib.text import made_text
from bpc_calib.text.made_text import ATTRIBUTES, fact, opening, question

__all__ = [
    "haystack",
    "key_values",
    "multi_key",
    "multi_query",
    "multi_value",
    "needle",
    "single",
    "tracking",
    "uuids",
]


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
