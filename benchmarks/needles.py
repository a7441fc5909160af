"""Does a model still find a fact when each step attends to a small share of a long context?

Made text with facts is prefilled; then a question about one of them is fed token by token, and the answer is decoded
greedily, with no dense layer and no lower bound on the tokens attended, so that every step has to choose. Full
attention, the exact best tokens and tokens drawn by chance stand beside BPC. The model must have learnt such facts.

    python benchmarks/needles.py --model MODEL --artifact FILE
"""

import argparse
import math
import random
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import report
import torch
from made_text import FACTS, NAMES, sentences
from torch import Tensor

from bpc_artifacts import load
from bpc_calib import BPCCache, enable
from bpc_calib.cache import BPCLayer
from bpc_calib.models import load_config, load_model, load_tokenizer

BATCH = 10
HARD: dict[str, Any] = {"dense_layers": (), "min_tokens": 1}


class ExactLayer(BPCLayer):
    """Ranks by the products of query and key themselves."""

    def rank(self, query: Tensor, projection: Tensor) -> Tensor:
        best = (query.float() @ self.keys.float().mT).amax(-2)
        return best.argsort(-1).argsort(-1)


class RandomLayer(BPCLayer):
    """Ranks by chance."""

    def rank(self, query: Tensor, projection: Tensor) -> Tensor:
        return torch.randint(1 << 30, self.keys.shape[:3])


class ExactCache(BPCCache):
    layer_class = ExactLayer


class RandomCache(BPCCache):
    layer_class = RandomLayer


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--artifact", "-a", type=Path, required=True)
    parser.add_argument("--facts", type=int, default=14)
    arguments = parser.parse_args()

    model, tokenizer = open_model(arguments.model)
    artifact = load(arguments.artifact)
    asked = [
        prompt(tokenizer, random.Random(f"{arguments.seed}/{i}"), arguments.tokens, arguments.facts)
        for i in range(arguments.prompts)
    ]
    methods: dict[str, Any] = {
        "exact best": lambda **rules: ExactCache(model.config, artifact, safeguard=0.0, **rules),
        "by chance": lambda **rules: RandomCache(model.config, artifact, safeguard=0.0, **rules),
        "BPC": lambda **rules: BPCCache(model.config, artifact, **rules),
        "BPC, no gain": lambda **rules: BPCCache(model.config, artifact, gain=False, **rules),
        "BPC, no safeguard": lambda **rules: BPCCache(model.config, artifact, safeguard=0.0, **rules),
        "BPC online": lambda **rules: BPCCache(model.config, **rules),
        "BPC online, no gain": lambda **rules: BPCCache(model.config, gain=False, **rules),
    }
    rows = [row("full attention", 1.0, model, tokenizer, asked, lambda: BPCCache(model.config, budget=1.0))]
    for name, make in methods.items():
        for budget in arguments.budgets:
            rows.append(row(name, budget, model, tokenizer, asked, lambda m=make, b=budget: m(budget=b, **HARD)))
    settings = {name: getattr(arguments, name) for name in ("tokens", "facts", "prompts", "budgets", "seed")}
    report.write(arguments.output, {"settings": settings, "artifact": artifact.metadata["algorithm"], "rows": rows})


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """With what every benchmark of needles takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", "-m", required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="of the context and the question")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.02, 0.005])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", "-o", type=Path)
    return parser


def open_model(name: str) -> tuple[Any, Any]:
    """An enabled model and its tokenizer."""
    commit = load_config(name)[1]
    model = load_model(name, revision=commit)
    enable(model)
    return model, load_tokenizer(name, revision=commit)


def prompt(
    tokenizer: Any, rng: random.Random, tokens: int, facts: int, digits: bool = True
) -> tuple[list[int], list[int], str]:
    """Context and question as token ids, and the answer; without `digits` the facts alone have any."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    names = [(rng.choice(FACTS), name) for name in rng.sample(NAMES, facts)]
    values = [f"{rng.randrange(10**6):06d}" for _ in names]
    stated = [ids(f" the {fact} of {name} is {value}.") for (fact, name), value in zip(names, values, strict=True)]
    wanted = rng.randrange(facts)
    question = ids(f" what is the {names[wanted][0]} of {names[wanted][1]}?")
    room = tokens - len(question) - sum(map(len, stated))
    filler = (text for text in sentences(rng) if " is " not in text and (digits or not re.search(r"\d", text)))
    parts: list[list[int]] = []
    while sum(map(len, parts)) < room:
        parts += [ids(text) for text in islice(filler, 16)]
    while sum(map(len, parts)) > room:
        parts.pop()
    for statement in stated:
        parts.insert(rng.randrange(len(parts) + 1), statement)
    return [token for part in parts for token in part], question, values[wanted]


@torch.inference_mode()
def answer(model: Any, cache: Any, contexts: list[list[int]], questions: list[list[int]], new: int) -> Tensor:
    """Greedy answers `[batch, new]`: the contexts in one step, every later token in its own."""
    prefix, prefix_mask = pad(contexts)
    question, question_mask = pad(questions)
    mask = torch.cat([prefix_mask, question_mask, torch.ones(len(contexts), new, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def step(ids: Tensor, start: int) -> Tensor:
        end = start + ids.shape[1]
        return model(
            input_ids=ids,
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]

    step(prefix, 0)
    start = prefix.shape[1]
    logits = torch.empty(0)
    for token in question.split(1, dim=1):
        logits = step(token, start)
        start += 1
    found: list[Tensor] = []
    for _ in range(new):
        found.append(logits.argmax(-1, keepdim=True))
        logits = step(found[-1], start)
        start += 1
    return torch.cat(found, dim=1)


def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """To the longest, on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def row(name: str, budget: float, model: Any, tokenizer: Any, asked: list[Any], make_cache: Any) -> dict[str, Any]:
    """Measure one method and print its line."""
    torch.manual_seed(0)
    right = 0
    for first in range(0, len(asked), BATCH):
        contexts, questions, answers = zip(*asked[first : first + BATCH], strict=True)
        new = max(len(tokenizer(f" {text}", add_special_tokens=False)["input_ids"]) for text in answers)
        made = answer(model, make_cache(), list(contexts), list(questions), new)
        right += sum(
            tokenizer.decode(ids).strip().startswith(text) for ids, text in zip(made.tolist(), answers, strict=True)
        )
    low, high = interval(right, len(asked))
    print(f"{name:<30} {budget:>6.1%} {right:>4} of {len(asked)}   95 % interval {low:.2f} to {high:.2f}", flush=True)
    if name == "full attention" and right < 0.9 * len(asked):
        print("this model does not find such facts even with full attention: the figures say little", file=sys.stderr)
    return {"method": name, "budget": budget, "right": right, "of": len(asked), "interval": [low, high]}


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's, at 95 %."""
    z, share = 1.96, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return round(middle - half, 4), round(middle + half, 4)


if __name__ == "__main__":
    main()
