"""Train a small model in steps; a run that was stopped goes on where it stopped when it is started again."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_llama import make_optimizers
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["Batch", "make_parser", "run"]

Batch = tuple[Tensor, Tensor, Tensor]
SAVE_EVERY = 100  # steps


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of every training."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="three steps on short sequences, to check the script")
    return parser


def run(
    folder: Path,
    model: transformers.LlamaForCausalLM,
    tokenizer: transformers.PreTrainedTokenizerFast,
    steps: int,
    rate: Callable[[int], float],
    batch: Callable[[int], Batch],
) -> None:
    """Train, and write model, tokenizer and `log.jsonl` into the folder.

    Args:
        rate: the factor of the learning rates in a step.
        batch: the sequences of a step: ids `[batch, length + 1]`; for every token but the first its weight in the
            loss, and whether it belongs to an answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizers = make_optimizers(model)
    checkpoint = folder / "checkpoint.safetensors"
    step = resume(checkpoint, model, optimizers) if checkpoint.exists() else 0
    began = time.perf_counter()
    while step < steps:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate(step)
        ids, weights, answers = batch(step)
        loss, right = train(model, optimizers, ids, weights, answers)
        step += 1
        if step % 20 == 0 or step == steps:
            line = {
                "step": step,
                "of": steps,
                "length": ids.shape[1] - 1,
                "loss": round(loss, 4),
                "answers": round(right, 4),
                "seconds": round(time.perf_counter() - began, 1),
            }
            print(json.dumps(line), flush=True)
            with open(folder / "log.jsonl", "a") as log:
                print(json.dumps(line), file=log)
        if step % SAVE_EVERY == 0 or step == steps:
            save(checkpoint, model, optimizers, step)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(
    model: transformers.LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    ids: Tensor,
    weights: Tensor,
    answers: Tensor,
) -> tuple[float, float]:
    """Take one step; return the weighted loss and the share of the answers' tokens that were right."""
    kept = ids.shape[1] - 1 - int(weights.any(0).float().argmax())  # no logits before the first token that counts
    model.set_attn_implementation("eager" if ids.shape[1] <= 257 else "sdpa")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=kept).logits
    target, weights, answers = (each[:, -kept:] for each in (ids, weights, answers))
    losses = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    right = (logits.detach().argmax(-1) == target)[answers].float().mean()
    return float(loss.detach()), float(right)


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
