"""Hide a problem in made text, so that the prompt has an exact number of tokens with any tokenizer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bpc_calib.errors import InputError
from bpc_calib.evaluation.tasks import GROWING, TASKS, Problem
from bpc_calib.text.made_text import filler
from bpc_calib.text.samples import beginning

__all__ = ["DEPTHS", "Frame", "Prompt", "count_answer", "draw_prompts", "hide", "largest", "make_frame"]

OPENING = 32  # minimum tokens of filler at the beginning: room for tokens that form across sentence borders
CLOSE = 64  # a problem grows until one part in so many is left
DEPTHS = 10  # needles are in the middle of each tenth of the text
MESSAGE = "<text and question>"  # stands for the user's message while the template is written


@dataclass(frozen=True)
class Frame:
    """What stands around the text and the question of a prompt: the model's chat template, where it has one.

    `before`: the tokens before the text; `after`: between the question and the beginning of the answer.
    """

    before: list[int]
    after: str


def make_frame(tokenizer: Any, raw: bool = False) -> Frame:
    """Return the tokenizer's chat template around one user's message; with `raw` or without a template only its BOS.

    Raises:
        InputError: the template does not show the message.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return Frame(beginning(tokenizer), "")
    messages = [{"role": "user", "content": MESSAGE}]
    try:
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as fault:
        raise InputError(f"the model's chat template cannot be used: {fault}; --raw leaves it out") from fault
    before, found, after = whole.partition(MESSAGE)
    if not found:
        raise InputError("the model's chat template does not show the user's message; --raw leaves the template out")
    return Frame(list(tokenizer(before, add_special_tokens=False)["input_ids"]), after)


@dataclass(frozen=True)
class Prompt:
    """A prompt: `ids` is context and question, `question` the tokens of the question, `answer` those to decode."""

    problem: Problem
    ids: list[int]
    question: int
    answer: int


def draw_prompts(
    task: str, tokenizer: Any, length: int, prompts: int, seed: int, frame: Frame | None = None
) -> list[Prompt]:
    """Return prompts of a task, the same for the same seed; needles are at the `DEPTHS` in turn.

    Args:
        task: one of `TASKS`.
        tokenizer: the tokenizer of the model.
        length: tokens of a prompt with the longest answer.
        prompts: number of prompts.
        seed: of the draws.
        frame: what stands around text and question; None: the tokenizer's BOS alone.

    Raises:
        InputError: the prompts need more tokens.
    """
    frame = frame or make_frame(tokenizer, raw=True)
    seeds = [f"{seed}/{task}/{length}/{number}" for number in range(prompts)]
    depths = [(number % DEPTHS + 0.5) / DEPTHS if task == "needle" else None for number in range(prompts)]
    if task in GROWING:
        problems, drawn = _grow(task, seeds, tokenizer, length, frame)
    else:
        drawn = list(map(random.Random, seeds))
        problems = [TASKS[task](rng) for rng in drawn]
    try:
        new = max(count_answer(problem, tokenizer) for problem in problems)
        return [
            hide(problem, tokenizer, length - new, rng, depth, frame=frame)
            for problem, rng, depth in zip(problems, drawn, depths, strict=True)
        ]
    except InputError as fault:
        raise InputError(f"task {task!r} at {length:,} tokens: {fault}") from fault


def _grow(
    task: str, seeds: Sequence[str], tokenizer: Any, length: int, frame: Frame
) -> tuple[list[Problem], list[random.Random]]:
    """Return problems that fill their prompts but for the longest answer of all, and the random states after them."""
    new, longest = 0, 1
    while longest > new:  # a problem of another size has another answer
        new = longest
        sizes = [largest(TASKS[task], seed, GROWING[task], tokenizer, length - new, frame) for seed in seeds]
        drawn = list(map(random.Random, seeds))
        problems = [TASKS[task](rng, size=size) for rng, size in zip(drawn, sizes, strict=True)]
        longest = max(count_answer(problem, tokenizer) for problem in problems)
    return problems, drawn


def hide(
    problem: Problem,
    tokenizer: Any,
    tokens: int,
    rng: random.Random,
    depth: float | None = None,
    *,
    frame: Frame | None = None,
) -> Prompt:
    """Put the statements of a problem into made text, and its question at the end.

    Args:
        tokens: number of tokens of the whole prompt, including those of the frame.
        depth: position of the first statement, from 0 (beginning of the text) to 1 (end). All other statements are at
            random positions, and None makes the first random too. Statements keep their order only if it is None.
        frame: what stands around the text and the question; None: the tokenizer's BOS alone.

    Raises:
        InputError: the problem needs more tokens.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    frame = frame or make_frame(tokenizer, raw=True)
    question = encode(_asked(problem, frame))
    room = tokens - len(frame.before) - len(question) - OPENING
    left = _left(problem, tokenizer, tokens, frame)
    if left < 0:
        raise InputError(f"the question and its statements need {-left:,} more")
    source = filler(rng)
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
    return Prompt(problem, [*frame.before, *text, *question], len(question), count_answer(problem, tokenizer))


def largest(
    make: Callable[..., Problem], seed: str, least: int, tokenizer: Any, tokens: int, frame: Frame | None = None
) -> int:
    """Return the size of a problem whose statements nearly fill a prompt.

    Args:
        make: a task that takes a size.
        seed: of the problem, for every size.
        least: the smallest size, which is returned even if it does not fit.
        tokens: of the prompt that the problem is for.
        frame: as for `hide`.
    """
    frame = frame or make_frame(tokenizer, raw=True)

    def fits(size: int) -> bool:
        return _left(make(random.Random(seed), size=size), tokenizer, tokens, frame) >= 0

    size, over = least, 2 * least
    while over <= tokens and fits(over):  # every statement has at least one token
        size, over = over, 2 * over
    while over - size > max(1, size // CLOSE):
        middle = (size + over) // 2
        size, over = (middle, over) if fits(middle) else (size, middle)
    return size


def count_answer(problem: Problem, tokenizer: Any) -> int:
    """Return the tokens to decode for an answer: its length plus one, twice its length for a list in free wording."""
    count = len(tokenizer(problem.answer, add_special_tokens=False)["input_ids"])
    return (count if len(problem.wanted) == 1 or problem.in_order else 2 * count) + 1


def _asked(problem: Problem, frame: Frame) -> str:
    """Return the question with the beginning of its answer; in a chat template the assistant begins with this."""
    return problem.question + (frame.after + problem.start.lstrip() if frame.after else problem.start)


def _left(problem: Problem, tokenizer: Any, tokens: int, frame: Frame) -> int:
    """Return the tokens that remain for filler, beyond the opening; negative if the problem does not fit."""
    parts = [_asked(problem, frame), *problem.statements]
    needed = sum(map(len, tokenizer(parts, add_special_tokens=False)["input_ids"]))
    return tokens - len(frame.before) - OPENING - needed
