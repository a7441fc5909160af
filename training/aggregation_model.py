"""Train a small Llama to say which words of a long list are the most common: from random weights, on a CPU.

    python training/aggregation_model.py FOLDER

The prompts are those of the tasks common-words and frequent-words of `bpc eval`, whose lists fill the prompt. The
stages go from short to long. `--tiny` checks the script in seconds.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from loop import Batch, make_parser, run
from small_llama import make_model
from tokenizer import make_tokenizer
from torch import Tensor

from bpc_calib.evaluation.prompts import hide, largest
from bpc_calib.evaluation.tasks import GROWING, TASKS

LONGEST_ANSWER = 12  # tokens: five words, each with a comma or a full stop, and some room
WARM_UP = 50  # steps


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `batch` prompts of `length` tokens."""

    steps: int
    length: int
    batch: int


STAGES = (Stage(800, 192, 16), Stage(300, 512, 6), Stage(200, 1024, 3), Stage(150, 2048, 2))
TINY = (Stage(2, 192, 2), Stage(1, 256, 1))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()

    tokenizer = make_tokenizer()
    torch.manual_seed(arguments.seed)
    model = make_model(len(tokenizer), layers=arguments.layers, kv_heads=2, head_dim=64, hidden=128, length=8192)
    stages = TINY if arguments.tiny else STAGES
    steps = [stage for stage in stages for _ in range(stage.steps)]

    def batch(step: int) -> Batch:
        names = [f"{arguments.seed}/{step}/{i}" for i in range(steps[step].batch)]
        ids, weights, answers = zip(*(sequence(name, tokenizer, steps[step].length) for name in names), strict=True)
        return torch.stack(ids), torch.stack(weights), torch.stack(answers)

    run(arguments.folder, model, tokenizer, len(steps), lambda step: schedule(step, len(steps)), batch)


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rates: a warm-up and a linear decay over the second half."""
    return min(1.0, (step + 1) / WARM_UP, 2 * (1 - step / steps))


def sequence(seed: str, tokenizer: transformers.PreTrainedTokenizerFast, length: int) -> Sequence[Tensor]:
    """int64 ids `[length + 1]`; for every token but the first its weight, and whether it belongs to the answer.

    The words of the answer are sorted where they are equally common, so that one answer is right.
    """
    task = random.Random(seed).choice(("common-words", "frequent-words"))
    tokens = length + 1 - LONGEST_ANSWER
    rng = random.Random(seed)
    problem = TASKS[task](rng, size=size(task, tokenizer, tokens))
    prompt = hide(problem, tokenizer, tokens, rng).ids
    wanted = sorted(problem.wanted) if task == "common-words" else problem.wanted
    answer = tokenizer(f" {', '.join(wanted)}.", add_special_tokens=False)["input_ids"]
    padding = [tokenizer.pad_token_id] * (LONGEST_ANSWER - len(answer))
    counted = torch.zeros(length + 1, dtype=torch.bool)
    counted[tokens : tokens + len(answer)] = True
    return torch.tensor([*prompt, *answer, *padding]), counted[1:].float(), counted[1:]


@functools.cache
def size(task: str, tokenizer: transformers.PreTrainedTokenizerFast, tokens: int) -> int:
    """The largest size that fits; it is the same for every seed, because every word is one token."""
    return largest(TASKS[task], "", GROWING[task], tokenizer, tokens)


if __name__ == "__main__":
    main()
