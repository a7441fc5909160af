"""Train the small Llama that comes with the package: from random weights, on made text, on a CPU.

    python training/demo_model.py FOLDER
    python training/demo_model.py FOLDER --layers 3 --kv-heads 1 --head-dim 128   # the second model of the study

Training is seeded; a run that was stopped goes on where it stopped when it is started again. Every sequence is filler
with facts, and questions about them further on; the stages go from short and dense to long and sparse. `--tiny` checks
the script in seconds.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizer import make_tokenizer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.evaluation.tasks import TASKS, Problem
from bpc_calib.text.made_text import ATTRIBUTES, FIRST, SECOND, fact, filler, is_held_out, name, number, question

MAX_LENGTH = 8192
FILLER_WEIGHT, STATED_WEIGHT = 0.3, 0.05  # an answer's is 1
MUON_RATE, ADAM_RATE = 2e-3, 3e-3
WARM_UP = 50  # steps
SAVE_EVERY = 100  # steps


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2, help="of 4 query heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="three steps on short sequences, to check the script")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    tokenizer = make_tokenizer()
    torch.manual_seed(arguments.seed)
    model = make_model(len(tokenizer), arguments.layers, arguments.kv_heads, arguments.head_dim)
    optimizers = make_optimizers(model)
    checkpoint = arguments.folder / "checkpoint.safetensors"
    step = resume(checkpoint, model, optimizers) if checkpoint.exists() else 0
    stages = TINY if arguments.tiny else STAGES
    steps = [stage for stage in stages for _ in range(stage.steps)]
    began = time.perf_counter()
    while step < len(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * schedule(step, stages)
        stage = steps[step]
        made = [sequence(random.Random(f"{arguments.seed}/{step}/{i}"), tokenizer, stage) for i in range(stage.batch)]
        ids, weights, answers = (torch.stack(parts) for parts in zip(*made, strict=True))
        loss, right = train(model, optimizers, ids, weights, answers)
        step += 1
        if step % 20 == 0 or step == len(steps):
            line = {
                "step": step,
                "of": len(steps),
                "length": stage.length,
                "loss": round(loss, 4),
                "answers": round(right, 4),
                "seconds": round(time.perf_counter() - began, 1),
            }
            print(json.dumps(line), flush=True)
            with open(arguments.folder / "log.jsonl", "a") as log:
                print(json.dumps(line), file=log)
        if step % SAVE_EVERY == 0 or step == len(steps):
            save(checkpoint, model, optimizers, step)
    model.to(torch.bfloat16).save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)


def make_model(vocabulary: int, layers: int, kv_heads: int, head_dim: int) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                weight.normal_()
                weight[:, 0] = 1.0
            elif name.endswith("model.norm.weight"):
                weight.fill_(0.06)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0, 0.01)
            elif weight.dim() == 2:
                weight.normal_(0, 1 / 16)
    return model


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_RATE, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def schedule(step: int, stages: Sequence[Stage]) -> float:
    """The factor of the learning rates: a warm-up, a linear decay, and another decay for the longest sequences."""
    left = sum(stage.steps for stage in stages) - step
    if left <= stages[-1].steps:
        return LAST_RATE * left / stages[-1].steps
    return min(1.0, (step + 1) / WARM_UP, (1 - step / DECAY_TO) / DECAYING)


def train(
    model: transformers.LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    ids: Tensor,
    weights: Tensor,
    answers: Tensor,
) -> tuple[float, float]:
    """Take one step; return the weighted loss and the share of the answers' tokens that were right."""
    model.set_attn_implementation("eager" if ids.shape[1] <= 257 else "sdpa")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    target = ids[:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    right = (logits.detach().argmax(-1) == target)[answers].float().mean()
    return float(loss.detach()), float(right)


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
        events.append((rng.uniform(start, 1), problem.question, problem.answer))
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
            kind = rng.choice(("common-words", "frequent-words")) if kind == "words" else kind
            made.append(TASKS[kind](rng, False))
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
            made.append(Problem((fact(attribute, whose, value),), question(attribute, whose), f" {value}.", (value,)))
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


def save(path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    for place, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer.{place}.{index}.{key}"] = value
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"step": str(step)})
    part.replace(path)


def resume(path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    tensors = load_file(path)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(tensors[f"model.{name}"])
    for place, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        for name, value in tensors.items():
            kind, *rest = name.split(".")
            if kind == "optimizer" and int(rest[0]) == place:
                state["state"].setdefault(int(rest[1]), {})[rest[2]] = value
        optimizer.load_state_dict(state)
    with safe_open(path, "pt") as file:
        return int(file.metadata()["step"])


if __name__ == "__main__":
    main()
