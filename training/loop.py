"""A small Llama, trained in steps; a run that was stopped goes on where it stopped when it is started again."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["Batch", "make_model", "run"]

Batch = tuple[Tensor, Tensor, Tensor]
SAVE_EVERY = 100  # steps
MUON_RATE, ADAM_RATE = 2e-3, 3e-3


def make_model(vocabulary: int) -> transformers.LlamaForCausalLM:
    """A Llama with random weights, whose residual stream starts with room for what layers write."""
    hidden = 256
    config = transformers.LlamaConfig(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
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
                weight.normal_(0, hidden**-0.5)
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
    checkpoint = folder / "checkpoint.pt"
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
    held = {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers], "step": step}
    part = path.with_suffix(".part")
    torch.save(held, part)
    part.replace(path)


def resume(path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    held = torch.load(path, weights_only=True)
    model.load_state_dict(held["model"])
    for optimizer, state in zip(optimizers, held["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return int(held["step"])
