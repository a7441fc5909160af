"""The plan of `bpc calibrate --dry-run`: what would be done, and what it would cost."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpc_cli.console import print_json, print_rows
from bpc_cli.opening import Dtype, OpenedModel
from bpc_cli.quantities import duration_text, size_text

if TYPE_CHECKING:
    from bpc_calib.calibration.plan import Plan

__all__ = ["print_plan"]


def print_plan(plan: "Plan", opened: OpenedModel, target: Path, corpora: list[str], as_json: bool) -> None:
    """Print the plan as a table or as JSON."""
    weights = _model_without_weights(opened)
    parameters, dtype = sum(weight.numel() for weight in weights.parameters()), weights.dtype
    model, seconds = plan.model, _forward_seconds(plan, parameters, opened.device, dtype)
    table = {
        "model": model.id,
        "revision": model.revision,
        "layers": len(model.full_layers),
        "layers_left_out": model.num_layers - len(model.full_layers),
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "bits": plan.bits,
        "method": plan.method.name,
        "position_shift": plan.position_shift,
        "corpora": corpora,
        "samples": plan.samples,
        "sequence_length": plan.sequence_length,
        "tokens": plan.tokens,
        "keys_per_head": plan.keys_per_head,
        "device": opened.device,
        "dtype": str(dtype).removeprefix("torch."),
        "weights_bytes": parameters * dtype.itemsize,
        "keys_bytes": plan.key_bytes(dtype.itemsize),
        "output": str(target),
        "output_bytes": plan.artifact_bytes,
        "forward_seconds_at_least": round(seconds),
    }
    if as_json:
        print_json(table)
    else:
        print_rows("Plan (nothing was done)", _rows(plan, table, seconds))


def _rows(plan: "Plan", table: dict[str, Any], seconds: float) -> dict[str, str]:
    model = plan.model
    return {
        "model": f"{model.id}{f' at {model.revision}' if model.revision else ''}",
        "layers": f"{len(model.full_layers)} of {model.num_layers} (full attention)",
        "heads": f"{model.kv_heads} KV heads of {model.head_dim}, {model.query_heads} query heads",
        "method": f"{plan.method.name}, {plan.bits} bits, position shift {('off', 'on')[plan.position_shift]}",
        "text": f"{plan.samples} samples of {plan.sequence_length:,} tokens from {', '.join(table['corpora'])}",
        "tokens": f"{plan.tokens:,}",
        "keys": f"{plan.keys_per_head:,} per KV head",
        "memory": f"{size_text(table['weights_bytes'])} for weights ({table['dtype']}, on {table['device']}), "
        f"{size_text(table['keys_bytes'])} for keys",
        "disk": f"{size_text(plan.artifact_bytes)} in {table['output']}",
        "time": f"at least {duration_text(seconds)} for the forward passes, from the speed of a matrix product here",
    }


def _model_without_weights(opened: OpenedModel) -> Any:
    """The model without memory for its weights, in the data type that it would be loaded in."""
    import torch
    from transformers import AutoModelForCausalLM

    chosen, config = opened.options.dtype, opened.config
    own = getattr(config, "dtype", None) or torch.float32
    dtype = own if chosen is Dtype.auto else getattr(torch, chosen.value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=opened.options.trust_remote_code)


def _forward_seconds(plan: "Plan", parameters: int, device: str, dtype: Any) -> float:
    """Operations of all forward passes, divided by the speed of one matrix product that is measured now."""
    import torch

    size = 1024
    left = torch.ones(size, size, dtype=dtype, device=device)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        float((left @ left)[0, 0])  # waits for the device
        times.append(time.perf_counter() - start)
    per_second = 2 * size**3 / min(times)
    model = plan.model
    attention = 2 * model.num_layers * model.query_heads * model.head_dim * plan.sequence_length
    return plan.tokens * (2 * parameters + attention) / per_second
