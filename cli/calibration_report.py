"""The result of `bpc calibrate`: residuals, time and memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpc_cli.console import print_table, printable
from bpc_cli.memory_use import peak_memory
from bpc_cli.quantities import duration_text, size_text
from bpc_cli.residual import residual_title
from bpc_cli.stage_times import StageTimes

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["STAGES", "print_report", "report"]

STAGES = {"load": "Loading", "text": "Reading text", "keys": "Collecting keys", "decompose": "Decomposing layers"}


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
