"""Generate endless text from a seed: prose, proofs and code, for use without other text.

All randomness comes from a `random.Random` argument, so the same seed generates the same text.
"""

import functools
import random
import zlib
from collections.abc import Callable, Iterator

__all__ = [
    "ATTRIBUTES",
    "FIRST",
    "SECOND",
    "STYLES",
    "document",
    "fact",
    "filler",
    "is_held_out",
    "name",
    "names",
    "number",
    "opening",
    "question",
    "words",
]

ADJECTIVES = """old young small large quiet bright dark cold heavy soft broken hidden ancient strange brave tired gentle
    empty narrow famous clever honest wooden distant sudden""".split()
PEOPLE = """teacher farmer doctor sailor soldier painter baker king queen child dog cat horse fox bear mother brother
    stranger merchant widow judge priest cook captain""".split()
THINGS = """lantern table mirror book door wheel clock cup bell map rope coin bread lamp chair boat letter basket knife
    blanket ring drum candle hammer""".split()
PLACES = """bridge river garden market forest tower castle harbor village mill church field cave well station island
    library kitchen valley gate""".split()
VERBS = """watched followed carried opened closed painted repaired found lost sold bought cleaned moved saw forgot
    remembered hid borrowed dropped described""".split()
WHERE = "near under behind beside above below inside outside beyond across".split()
WHEN = "Yesterday|In the morning|At night|Long ago|After the storm|Before winter|Once|Later".split("|")
LETTERS = "x y z n m k p q".split()
OBJECTS = "set group graph sequence function matrix ring space map sum".split()
PROPERTIES = "finite bounded closed open compact even odd positive continuous linear".split()
FUNCTIONS = "read write check count merge split find sort load update".split()
FIELDS = "item node value index total buffer path line key size".split()

# A name is a pair of these words, which no other text contains.
FIRST = """amber coral silver golden crimson violet scarlet ivory copper marble velvet crystal cobalt onyx topaz jade
    ruby pearl misty frosty sunny stormy rusty dusty silent lonely wild royal lucky swift steady nimble arctic tropical
    northern southern eastern western polar lunar solar hollow polished ragged striped spotted woven curly""".split()
SECOND = """falcon otter badger raven willow maple cedar birch hazel rowan alder walnut heron sparrow beaver lizard
    turtle salmon dolphin panther tiger leopard monkey camel spider hornet beetle cricket lobster oyster walrus penguin
    pelican buffalo antelope squirrel hedgehog weasel ferret rabbit orchid tulip clover thistle lotus fern ivy
    cactus""".split()


ATTRIBUTES = ("pass key", "door code", "badge number", "account number", "magic number", "locker code")


def prose(rng: random.Random) -> str:
    """Return one sentence. As in every style, it begins with a space or a newline."""
    person, thing, place = rng.choice(PEOPLE), rng.choice(THINGS), rng.choice(PLACES)
    adjective, other, verb, where = rng.choice(ADJECTIVES), rng.choice(ADJECTIVES), rng.choice(VERBS), rng.choice(WHERE)
    kind = rng.randrange(5)
    if kind == 0:
        return f" The {adjective} {person} {verb} the {thing}."
    if kind == 1:
        return f" The {adjective} {person} {verb} a {other} {thing} {where} the {place}."
    if kind == 2:
        return f" {rng.choice(WHEN)}, the {person} {verb} the {thing} {where} a {adjective} {place}."
    if kind == 3:
        return f" The {person} said that the {thing} was {adjective} and the {place} was {other}."
    return f" Nobody knew why the {thing} {where} the {place} was so {adjective}."


def proof(rng: random.Random) -> str:
    """Return one step of something like a proof; its sums are correct."""
    a, b, (x, y) = rng.randrange(1, 100), rng.randrange(1, 100), rng.sample(LETTERS, 2)
    thing, other = rng.choice(OBJECTS), rng.choice(PROPERTIES)
    kind = rng.randrange(5)
    if kind == 0:
        return f" Suppose {a} + {b} = {a + b}."
    if kind == 1:
        return f" Let {x} = {a} and {y} = {b}; then {x} + {y} = {a + b}."
    if kind == 2:
        return f" By lemma {a}, every {rng.choice(PROPERTIES)} {thing} is {other}."
    if kind == 3:
        return f" Hence the {thing} {x} is {other} and {y} > {b}."
    return f" Assume that {x} < {a}; it follows that the {thing} is {other}."


def code(rng: random.Random) -> str:
    """Return one statement or short function of something like Python."""
    a, b, (x, y) = rng.randrange(1, 100), rng.randrange(1, 100), rng.sample(LETTERS, 2)
    function, field, other = rng.choice(FUNCTIONS), rng.choice(FIELDS), rng.choice(FIELDS)
    kind = rng.randrange(4)
    if kind == 0:
        return f"\ndef {function}_{field}({x}, {y}):\n    if {x} > {a}:\n        return {y} + {b}\n    return {x}\n"
    if kind == 1:
        return f"\nfor {x} in range({a}):\n    {field} = {other} + {function}({x}, {b})\n"
    if kind == 2:
        return f"\n{field} = {function}_{other}({a}, {x})\n"
    return f"\nwhile {field} < {a}:\n    {field} = {field} * {b} + {x}\n"


STYLES: dict[str, Callable[[random.Random], str]] = {"prose": prose, "proofs": proof, "code": code}


def filler(rng: random.Random, style: str | None = None) -> Iterator[str]:
    """Yield endless sentences of one style, or of all styles, with a new style every few sentences."""
    while True:
        sentence = STYLES[style or rng.choice(list(STYLES))]
        for _ in range(rng.randrange(4, 24)):
            yield sentence(rng)


def document(rng: random.Random, style: str, sentences: int = 400) -> str:
    """Return one text of a style, with facts here and there, and later a question and its answer about them."""
    open_facts: list[tuple[str, str, str]] = []
    parts: list[str] = []
    for sentence, _ in zip(filler(rng, style), range(sentences), strict=False):
        parts.append(sentence)
        kind = rng.random()
        if kind < 0.06:
            open_facts.append((rng.choice(ATTRIBUTES), name(rng), number(rng)))
            parts.append(fact(*open_facts[-1]))
        elif kind < 0.12 and open_facts:
            attribute, whose, value = open_facts.pop(rng.randrange(len(open_facts)))
            parts.append(f"{question(attribute, whose)}{opening(attribute, whose)} {value}.")
    return "".join(parts)


def fact(attribute: str, whose: str, value: str) -> str:
    """Return a sentence with a fact to find later."""
    return f" The {attribute} of {whose} is {value}."


def question(attribute: str, whose: str) -> str:
    """Return the question about a fact."""
    return f" What is the {attribute} of {whose}?"


def opening(attribute: str, whose: str) -> str:
    """Return the answer to this question, up to the value."""
    return f" The {attribute} of {whose} is"


def name(rng: random.Random, *, held_out: bool = False) -> str:
    """Return two words, such as `amber falcon`: one of 2,304 names. One eighth of the names is held out of all text."""
    while True:
        made = f"{rng.choice(FIRST)} {rng.choice(SECOND)}"
        if is_held_out(made) == held_out:
            return made


@functools.cache
def names() -> tuple[str, ...]:
    """Return all names, held out or not."""
    return tuple(f"{first} {second}" for first in FIRST for second in SECOND)


def is_held_out(made: str) -> bool:
    """Return True if the name is reserved for evaluation, so that a model trained on this text has never seen it."""
    return zlib.crc32(made.encode()) % 8 == 0


def number(rng: random.Random) -> str:
    """Return six digits."""
    return f"{rng.randrange(10**6):06d}"


def words() -> list[str]:
    """Return plain nouns, for lists of words."""
    return PEOPLE + THINGS + PLACES
