"""Train the small Llama that comes with the package: from random weights, on made text, on a CPU.

    python training/demo_model.py FOLDER
    python training/demo_model.py FOLDER --layers 3 --kv-heads 1 --head-dim 128   # the second model of the study

Training is seeded; a run that was stopped goes on where it stopped when it is started again. Every sequence is filler
with facts, and questions about them further on; the stages go from short and dense to long and sparse. `--tiny` checks
the script in seconds.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from loop import Batch, make_parser, run
from small_llama import make_model
from tokenizer import make_tokenizer
from torch import Tensor

from bpc_calib.evaluation.tasks import TASKS, Problem
from bpc_calib.text.made_text import (
    ATTRIBUTES,
    FIRST,
    SECOND,
    fact,
    filler,
    is_held_out,
    name,
    number,
    opening,
    question,
)

FILLER_WEIGHT, STATED_WEIGHT = 0.3, 0.05  # an answer's is 1
WARM_UP = 50  # steps


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `batch` sequences of `length` tokens, with one question per `spacing` tokens (from, to)."""

    steps: int
    length: int
    batch: int
    spacing: tuple[int, int]
    tasks: tuple[float, float, float, float, float]  # needle, multi-value, multi-query, tracking, words
    drills: float = 0.0  # share of the sequences
    near: float = 0.4  # sequences whose names share a few words
    alike: float = 0.0  # of these, those whose names all share their second word
    distinct: bool = False  # whether the second words of other names all differ


EASY = (1.0, 0.0, 0.0, 0.0, 0.0)
MIXED = (0.76, 0.07, 0.07, 0.07, 0.03)
STAGES = (
    Stage(1200, 64, 64, (31, 32), EASY, drills=0.7),
    Stage(500, 128, 32, (30, 45), EASY, drills=0.4, alike=0.5),
    Stage(500, 256, 16, (30, 60), EASY, drills=0.2, alike=0.5),
    Stage(300, 512, 8, (35, 100), MIXED, near=0.1, distinct=True),
    Stage(300, 1024, 4, (40, 150), MIXED, near=0.1, distinct=True),
    Stage(400, 2048, 2, (45, 200), MIXED, near=0.1, distinct=True),
    Stage(150, 4096, 1, (80, 400), MIXED, near=0.1, distinct=True),
    Stage(300, 8192, 1, (120, 400), MIXED, near=0.1, distinct=True),
)
DECAY_TO, DECAYING = 3580, 0.6  # linear to zero at that step, over this share of the steps before it
LAST_RATE = 0.25  # the last stage begins again, at this share of the rates
TINY = (Stage(2, 64, 2, (31, 32), MIXED, drills=0.5), Stage(1, 512, 1, (35, 100), MIXED, near=0.1, distinct=True))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2, help="of 4 query heads")
    parser.add_argument("--head-dim", type=int, default=64)
    arguments = parser.parse_args()

    tokenizer = make_tokenizer()
    torch.manual_seed(arguments.seed)
    model = make_model(
        len(tokenizer), layers=arguments.layers, kv_heads=arguments.kv_heads, head_dim=arguments.head_dim
    )
    stages = TINY if arguments.tiny else STAGES
    steps = [stage for stage in stages for _ in range(stage.steps)]

    def batch(step: int) -> Batch:
        drawn = [random.Random(f"{arguments.seed}/{step}/{i}") for i in range(steps[step].batch)]
        ids, weights, answers = zip(*(sequence(rng, tokenizer, steps[step]) for rng in drawn), strict=True)
        return torch.stack(ids), torch.stack(weights), torch.stack(answers)

    run(arguments.folder, model, tokenizer, len(steps), lambda step: schedule(step, stages), batch)


def schedule(step: int, stages: Sequence[Stage]) -> float:
    """The factor of the learning rates: a warm-up, a linear decay, and another decay for the longest sequences."""
    left = sum(stage.steps for stage in stages) - step
    if left <= stages[-1].steps:
        return LAST_RATE * left / stages[-1].steps
    return min(1.0, (step + 1) / WARM_UP, (1 - step / DECAY_TO) / DECAYING)


def sequence(rng: random.Random, tokenizer: transformers.PreTrainedTokenizerFast, stage: Stage) -> tuple[Tensor, ...]:
    """int64 ids `[length + 1]`; for every token but the first its weight, and whether it belongs to an answer."""
    if rng.random() < stage.drills:
        return drill(rng, tokenizer, stage.length)
    low, high = stage.spacing
    spacing = math.exp(rng.uniform(math.log(low), math.log(high)))
    asked = problems(rng, stage, max(1, round(stage.length / spacing)))
    # In most sequences all facts come before the first question: with few open facts the newest is a good guess, and
    # the model would learn nothing else.
    end = 0.5 if rng.random() < 0.8 else 1.0
    events: list[tuple[float, str, str]] = []  # when, text, answer behind it
    for problem in asked:
        times = sorted(end * rng.random() for _ in range(len(problem.statements)))
        events += zip(times, problem.statements, [""] * len(times), strict=True)
        start = end if end < 1 else times[-1]
        events.append((rng.uniform(start, 1), problem.question + problem.start, problem.answer))
    events.sort(key=lambda event: event[0])
    texts = [text for _, *pair in events for text in pair]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    room = stage.length - sum(map(len, encoded))
    # Filler is spread between the events at random.
    gaps = sorted(rng.random() for _ in range(len(events)))
    said = filler_ids(rng, tokenizer, max(room, 0))
    cuts = [round(gap * len(said)) for gap in gaps]
    ids, weights, answers = [tokenizer.bos_token_id], [], []

    def add(tokens: list[int], weight: float, answer: bool) -> None:
        ids.extend(tokens)
        weights.extend([weight] * len(tokens))
        answers.extend([answer] * len(tokens))

    start = 0
    for i, cut in enumerate(cuts):
        add([token for sentence in said[start:cut] for token in sentence], FILLER_WEIGHT, False)
        add(encoded[2 * i], STATED_WEIGHT, False)  # random names and numbers: hardly anything to learn
        add(encoded[2 * i + 1], 1.0, True)
        start = cut
    add([token for sentence in said[start:] for token in sentence], FILLER_WEIGHT, False)
    end = stage.length
    if len(weights) < end:
        add([tokenizer.pad_token_id] * (end - len(weights)), 0.0, False)
    return torch.tensor(ids[: end + 1]), torch.tensor(weights[:end]), torch.tensor(answers[:end])


def drill(rng: random.Random, tokenizer: transformers.PreTrainedTokenizerFast, length: int) -> tuple[Tensor, ...]:
    """A repeated run of tokens, often of so few different ones that the last token alone does not predict the next.

    The period differs between sequences: only the content shows where to look.
    """
    words = range(tokenizer.vocab_size // 3, tokenizer.vocab_size)
    few = rng.sample(words, round(4 * 100 ** rng.random()))
    period = rng.randrange(12, length // 2)
    once = [rng.choice(few) for _ in range(period)]
    ids = (once * (length // period + 1))[:length]
    return (
        torch.tensor([tokenizer.bos_token_id, *ids]),
        (torch.arange(length) >= period).float(),
        torch.zeros(length, dtype=torch.bool),
    )


def problems(rng: random.Random, stage: Stage, count: int) -> list[Problem]:
    """`count` questions, no two about the same fact.

    In most sequences all facts share one attribute; otherwise the attribute would tell most facts apart and the model
    would never learn names. In some, all names share a few words, so that both words of a name count.
    """
    attributes = [rng.choice(ATTRIBUTES)] if rng.random() < 0.7 else list(ATTRIBUTES)
    near = rng.random() < stage.near
    first, second = rng.sample(FIRST, 6), rng.sample(SECOND, 6)
    if near and stage.alike and rng.random() < stage.alike:
        first, second = FIRST, second[:1]
    made: list[Problem] = []
    asked: set[tuple[str, str]] = set()
    for kind in rng.choices(("needle", "multi-value", "multi-query", "tracking", "words"), stage.tasks, k=count):
        if kind != "needle":
            lists = kind == "words"
            kind = rng.choice(("common-words", "frequent-words")) if lists else kind
            problem = TASKS[kind](rng, False)
            made.append(replace(problem, question="") if lists else problem)  # the bundled model was trained so
            continue
        whose = name(rng)
        if stage.distinct and not near:
            used = {other.split()[1] for _, other in asked}
            if len(used) > 40:
                continue
            while whose.split()[1] in used:
                whose = name(rng)
        if near:
            while is_held_out(whose := f"{rng.choice(first)} {rng.choice(second)}"):
                pass
        if asked and rng.random() < (0.25 if stage.alike else 0.1):  # another attribute of the same name
            whose = rng.choice(sorted(asked))[1]
        attribute = rng.choice(attributes)
        if (attribute, whose) not in asked:
            asked.add((attribute, whose))
            value = number(rng)
            asked_now = question(attribute, whose), opening(attribute, whose)
            made.append(Problem((fact(attribute, whose, value),), *asked_now, f" {value}.", (value,)))
    return made


def filler_ids(rng: random.Random, tokenizer: transformers.PreTrainedTokenizerFast, room: int) -> list[list[int]]:
    """Sentences with at most `room` tokens in total."""
    said: list[list[int]] = []
    sentences = filler(rng)
    left = room
    while True:
        for ids in tokenizer([next(sentences) for _ in range(32)], add_special_tokens=False)["input_ids"]:
            if len(ids) > left:
                return said
            said.append(ids)
            left -= len(ids)


if __name__ == "__main__":
    main()
