"""Seeded text with facts and questions about them, of the kind that small retrieval models are trained on.

python benchmarks/made_text.py FOLDER --documents 200
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

NAMES = "alder birch cedar maple willow hazel rowan falcon raven badger otter topaz onyx cobalt".split()
FACTS = ("pass key", "door code", "badge number", "account id", "special magic number")
ADJECTIVES = "old young small large quiet bright dark cold heavy soft broken hidden ancient strange brave".split()
PEOPLE = "teacher farmer doctor sailor soldier painter baker king queen child dog cat horse fox bear".split()
THINGS = "lantern table mirror book door wheel clock cup bell map rope coin bread lamp chair boat".split()
PLACES = "bridge river garden market forest tower castle harbor village mill church field cave well".split()
VERBS = "watched followed carried opened closed painted repaired found lost sold bought cleaned moved saw".split()
WHERE = "near under behind beside above below inside outside beyond across".split()


def sentences(rng: random.Random) -> Iterator[str]:
    """Prose, sums and code without end, with a fact or a question now and then."""
    facts: dict[tuple[str, str], str] = {}
    while True:
        kind = rng.random()
        if kind < 0.04:
            fact = (rng.choice(FACTS), rng.choice(NAMES))
            facts[fact] = f"{rng.randrange(10**6):06d}"
            yield f" the {fact[0]} of {fact[1]} is {facts[fact]}."
        elif kind < 0.06 and facts:
            fact = rng.choice(sorted(facts))
            yield f" what is the {fact[0]} of {fact[1]}? {facts[fact]}."
        elif kind < 0.14:
            a, b = rng.randrange(100), rng.randrange(100)
            yield f" suppose {a} + {b} = {a + b}."
        elif kind < 0.2:
            x, y = rng.sample("x y z n m k p q".split(), 2)
            yield f" let {x} = {rng.randrange(100)}; if {x} > {y} : return {y} + {rng.randrange(100)}."
        else:
            place = f" {rng.choice(WHERE)} a {rng.choice(PLACES)}" if rng.random() < 0.5 else ""
            yield (
                f" the {rng.choice(ADJECTIVES)} {rng.choice(PEOPLE)} {rng.choice(VERBS)} "
                f"the {rng.choice(THINGS)}{place}."
            )


def document(seed: str, characters: int) -> str:
    """One text of at least so many characters; the same seed gives the same text."""
    text = ""
    for sentence in sentences(random.Random(seed)):
        text += sentence
        if len(text) >= characters:
            return text
    raise AssertionError("sentences never end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--characters", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for number in range(arguments.documents):
        path = arguments.folder / f"{number:04d}.txt"
        path.write_text(document(f"{arguments.seed}/{number}", arguments.characters))
    print(f"Wrote {arguments.documents} documents to {arguments.folder}")


if __name__ == "__main__":
    main()
