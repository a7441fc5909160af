"""The plan of `bpc calibrate --dry-run`: what would be done, and what it would cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpc_cli.calibration_memory import calibration_memory
from bpc_cli.console import print_json, print_rows
from bpc_cli.opening import OpenedModel
from bpc_cli.quantities import duration_text, heads_text, size_text
from bpc_cli.weightless import model_without_weights, weight_bytes

if TYPE_CHECKING:
    from bpc_calib.calibration.plan import Plan

__all__ = ["print_plan"]


def print_plan(plan: "Plan", opened: OpenedModel, target: Path, corpora: list[str], as_json: bool) -> None:
    """Print the plan as a table or as JSON."""
    import torch

    weights, device = model_without_weights(opened), torch.device(opened.device)
    model, dtype = plan.model, weights.dtype
    table: dict[str, Any] = {
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
        "weights_bytes": weight_bytes(weights),
        "keys_bytes": plan.key_bytes(dtype.itemsize),
        "output": str(target),
        "output_bytes": plan.artifact_bytes,
    }
    table |= _costs(plan, weights, device, table["weights_bytes"])
    if as_json:
        print_json(table)
    else:
        print_rows("Plan (nothing was done)", _rows(plan, table))


def _costs(plan: "Plan", weights: Any, device: Any, weights_bytes: int) -> dict[str, Any]:
    """Time, memory and disk."""
    from bpc_calib.calibration.forecast import forecast

    found = forecast(plan, weights, device)
    return {
        "collect_seconds": None if found.collect_seconds is None else round(found.collect_seconds, 1),
        "decompose_seconds": round(found.decompose_seconds, 1),
        **calibration_memory(found, weights_bytes, device),
        "work_bytes": found.disk_bytes,
    }


def _rows(plan: "Plan", table: dict[str, Any]) -> dict[str, str]:
    model, on_gpu, collecting = plan.model, table["gpu_memory_bytes"], table["collect_seconds"]
    memory = f"{size_text(table['memory_bytes'])} of main memory"
    if on_gpu:
        memory += f", {size_text(on_gpu)} on {table['device']}"
    return {
        "model": f"{model.id}{f' at {model.revision}' if model.revision else ''}",
        "layers": f"{len(model.full_layers)} of {model.num_layers} (full attention)",
        "heads": heads_text(model.kv_heads, model.query_heads, model.head_dim),
        "method": f"{plan.method.name}, {plan.bits} bits, position shift {('off', 'on')[plan.position_shift]}",
        "text": f"{plan.samples} samples of {plan.sequence_length:,} tokens from {', '.join(table['corpora'])}",
        "tokens": f"{plan.tokens:,}",
        "keys": f"{plan.keys_per_head:,} per KV head",
        "weights": f"{size_text(table['weights_bytes'])} ({table['dtype']}, on {table['device']})",
        "memory": f"about {memory}",
        "disk": f"{size_text(plan.artifact_bytes)} in {table['output']}, {size_text(table['work_bytes'])} until then",
        "collecting": "unknown, because some layers of this model do not run alone"
        if collecting is None
        else f"about {duration_text(collecting)}, from some layers of each kind on one sample",
        "decomposing": f"about {duration_text(table['decompose_seconds'])}, from a fit of some layers with fewer keys",
    }
