"""A question with an answer in a text, and the score of what a model says."""

from dataclasses import dataclass

__all__ = ["Problem", "score"]


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
