"""What `bpc calibrate` reports: with --dry-run the plan and its costs, else residuals, time and memory."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpc_cli.artifact_tables import residual_title
from bpc_cli.console import (
    duration_text,
    heads_text,
    print_json,
    print_rows,
    print_table,
    printable,
    rough_text,
    size_text,
)
from bpc_cli.opening import OpenedModel, model_without_weights, open_tokenizer, weight_bytes
from bpc_cli.progress import StageTimes

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_calib.calibration.forecast import Costs
    from bpc_calib.calibration.plan import Plan
    from bpc_calib.text.known_corpora import Corpus

NEED = 2  # passes that measuring needs on a text takes as long as: one over it, and those of its newest tokens by layer
STAGES = {
    "load": "Loading",
    "text": "Reading text",
    "keys": "Collecting keys",
    "decompose": "Decomposing layers",
    "needs": "Measuring needs",
}


def report(
    artifact: "ProjectionArtifact", target: Path, device: str, seconds: float, times: StageTimes
) -> dict[str, Any]:
    """What --json prints."""
    import torch

    from bpc_artifacts import verdict

    metadata = artifact.metadata
    tokens = times.steps.get("keys", 0) * metadata["calibration"]["sequence_length"]
    on_gpu = torch.device(device).type == "cuda"
    return {
        "output": str(target),
        "model": metadata["model"]["id"],
        "algorithm": metadata["algorithm"],
        "device": device,
        "tokens": metadata["calibration"]["tokens"],
        "keys_per_head": metadata["calibration"]["keys_per_head"],
        "residual": metadata["metrics"]["residual"],
        "residual_by_layer": metadata["metrics"]["residual_by_layer"],
        "held_out": metadata["metrics"].get("held_out"),
        "verdict": verdict(artifact),
        "seconds": round(seconds, 1),
        "seconds_by_stage": {stage: round(spent, 1) for stage, spent in times.seconds.items()},
        "tokens_per_second": round(tokens / times.seconds["keys"], 1) if tokens else None,
        "peak_memory_bytes": peak_memory(),
        "peak_gpu_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def print_report(result: dict[str, Any]) -> None:
    """Print a report as a table, three lines and the verdict."""
    from rich.table import Table

    held_out = result["held_out"]
    columns = [result["residual_by_layer"] | {"all": result["residual"]}]
    if held_out is not None:
        columns.append(held_out["residual_by_layer"] | {"all": held_out["residual"]})
    table = Table("layer", "residual", *(["new text"] * (len(columns) - 1)))
    for layer in columns[0]:
        if layer == "all":
            table.add_section()
        table.add_row(layer, *(f"{column[layer]:.4f}" for column in columns))
    print_table(f"{residual_title(result['algorithm'])}, mean over KV heads", table)
    peak = result["peak_memory_bytes"]
    memory = "unknown on this system" if peak is None else size_text(peak)
    if result["peak_gpu_memory_bytes"]:
        memory += f" and {size_text(result['peak_gpu_memory_bytes'])} on the GPU"
    stages = {
        stage: f"{STAGES[stage].lower()} {duration_text(spent)}" for stage, spent in result["seconds_by_stage"].items()
    }
    if result["tokens_per_second"] is not None:
        stages["keys"] += f" at {result['tokens_per_second']:,.0f} tokens/s"
    print(f"{result['tokens']:,} tokens, {result['keys_per_head']:,} keys per KV head")
    print(f"{duration_text(result['seconds'])} ({', '.join(stages.values())}), peak memory {memory}")
    for sentence in result["verdict"]:
        print(sentence)
    print(f"Wrote {printable(result['output'])}")


def print_plan(plan: "Plan", opened: OpenedModel, target: Path, corpora: "list[Corpus]", as_json: bool) -> None:
    """Print the plan as a table or as JSON; refuse text that is too short for it."""
    import torch

    from bpc_calib.calibration.forecast import costs
    from bpc_calib.calibration.run_text import try_text

    unread = try_text(corpora, lambda: open_tokenizer(opened), plan)
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
        "corpora": [corpus.name for corpus in corpora],
        "corpora_not_read": unread,
        "samples": plan.samples,
        "sequence_length": plan.sequence_length,
        "tokens": plan.tokens,
        "keys_per_head": plan.keys_per_head,
        "measured_samples": len({sample for sample, _ in plan.measured}),
        "measured_lengths": sorted({length for _, length in plan.measured}, reverse=True),
        "device": opened.device,
        "dtype": str(dtype).removeprefix("torch."),
        "weights_bytes": weight_bytes(weights),
        "keys_bytes": plan.key_bytes(dtype.itemsize),
        "output": str(target),
        "output_bytes": plan.artifact_bytes,
    }
    found = costs(plan, weights, device)
    table |= calibration_memory(found, table["weights_bytes"], device) | {"work_bytes": found.disk_bytes}
    table["seconds"] = calibration_seconds(plan, weights, device)
    if as_json:
        print_json(table)
    else:
        print_rows("Plan (nothing was done)", _plan_rows(plan, table))


def _plan_rows(plan: "Plan", table: dict[str, Any]) -> dict[str, str]:
    model, on_gpu, unread = plan.model, table["gpu_memory_bytes"], ", ".join(table["corpora_not_read"])
    memory = f"{size_text(table['memory_bytes'])} of main memory"
    if on_gpu:
        memory += f", {size_text(on_gpu)} on {table['device']}"
    return {
        "model": f"{model.id}{f' at {model.revision}' if model.revision else ''}",
        "layers": f"{len(model.full_layers)} of {model.num_layers} (full attention)",
        "heads": heads_text(model.kv_heads, model.query_heads, model.head_dim),
        "method": f"{plan.method.name}, {plan.bits} bits, position shift {('off', 'on')[plan.position_shift]}",
        "text": f"{plan.samples} samples of {plan.sequence_length:,} tokens from {', '.join(table['corpora'])}"
        + (f" (not read yet: {unread})" if unread else ""),
        "tokens": f"{plan.tokens:,}",
        "keys": f"{plan.keys_per_head:,} per KV head",
        "needs": _needs_text(plan),
        "weights": f"{size_text(table['weights_bytes'])} ({table['dtype']}, on {table['device']})",
        "memory": f"about {memory}",
        "time": "not known beforehand for a mixture of experts"
        if table["seconds"] is None
        else f"about {rough_text(table['seconds'])} here; a stopped run goes on where it was",
        "disk": f"{size_text(plan.artifact_bytes)} in {table['output']}, {size_text(table['work_bytes'])} until then",
    }


def _needs_text(plan: "Plan") -> str:
    from bpc_calib.calibration.plan import LEAST_LENGTH

    if plan.measured:
        samples, lengths = map(set, zip(*plan.measured, strict=True))
        tokens = " and ".join(f"{length:,}" for length in sorted(lengths, reverse=True))
        return f"measured on {len(samples)} of the samples ({tokens} tokens), for shares by head"
    if not plan.method.needs:
        return f"not measured by {plan.method.name}: all heads get equal shares"
    if plan.model.ranks > 1:
        return "not measured with --tensor-parallel: all heads get equal shares"
    return f"not measured on samples of fewer than {LEAST_LENGTH:,} tokens: all heads get equal shares"


def calibration_memory(costs: "Costs", weights_bytes: int, device: Any) -> dict[str, int | None]:
    """Peaks in bytes: of main memory, with and without what this process takes now, and of the GPU (None: no GPU).

    What this process takes now are mostly the libraries, which a calibration loads, too.
    """
    on_device, on_cpu = weights_bytes + max(costs.pass_bytes, costs.fit_bytes), device.type == "cpu"
    added = on_device if on_cpu else costs.fit_bytes
    return {
        "memory_bytes": (_status("VmRSS") or 0) + added,
        "added_memory_bytes": added,
        "gpu_memory_bytes": None if on_cpu else on_device,
    }


def calibration_seconds(plan: "Plan", model: Any, device: Any) -> float | None:
    """Forecast how long the passes of a calibration take here, most of its time; None: unknown (`pass_operations`).

    Args:
        plan: the calibration.
        model: a transformers model, with or without memory for its weights.
        device: that will run it.
    """
    from bpc_calib.bench.passes import pass_operations, pass_seconds

    total = 0.0
    for length, times in [(plan.sequence_length, plan.samples), *((each, NEED) for _, each in plan.measured)]:
        counted = pass_operations(model, plan.model, length)
        if counted is None:
            return None
        total += times * pass_seconds(counted, model.dtype, device)
    return total


def peak_memory() -> int | None:
    """The most bytes of main memory used so far. On Linux `getrusage` would include the process that started it."""
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM")


def _status(name: str) -> int | None:
    """Bytes that Linux counts for this process; None on other systems."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
