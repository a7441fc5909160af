"""Questions about passages that fill the prompt: an answer from two of them, and a passage word for word."""

import random

from bpc_calib.evaluation.problem import Problem
from bpc_calib.text import made_text

__all__ = ["copying", "passages"]


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
    """Return a problem with `size` passages of `sentences` sentences; one must be repeated word for word."""
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
