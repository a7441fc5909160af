"""`bpc calibrate`: from a model and text to a projection artifact."""

import enum
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_cli.arguments import (
    AsJson,
    Device,
    Dtype,
    Model,
    NoProgress,
    Revision,
    TrustRemoteCode,
    WeightsDtype,
    pick_device,
)
from bpc_cli.console import (
    bars,
    command,
    note,
    print_json,
    print_table,
    printable,
    quiet_libraries,
    residual_title,
)

if TYPE_CHECKING:
    from bpc_calib.calibration.plan import Plan

STAGES = {"load": "Loading", "text": "Reading text", "keys": "Collecting keys", "decompose": "Decomposing layers"}


class Method(str, enum.Enum):
    """How projections are found."""

    score_aware = "score-aware"
    paper = "paper"


@command
def calibrate(
    model: Model,
    samples: Annotated[int, typer.Option(help="Text samples, shared evenly by the corpora.")] = 180,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help="pg19, proofpile, codeparrot, demo, PATH or NAME=PATH (a text, code, .jsonl, .json.gz or .parquet "
            "file, or a folder of them); may be repeated. Default: the first three, from the Hub; of the bundled "
            "model: demo, which is made on the spot.",
            metavar="CORPUS",
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens a sample. Default: 8192, or the model's limit if lower.", show_default=False),
    ] = None,
    bits: Annotated[int, typer.Option(help="Code length: 32, 64 or 128.")] = 64,
    method: Annotated[
        Method,
        typer.Option(
            help="score-aware: what the queries ask counts, 8 steps a bit, least squares, centring, position shift; "
            "paper: one step, no shift."
        ),
    ] = Method.score_aware,
    position_shift: Annotated[
        bool | None,
        typer.Option(
            "--position-shift/--no-position-shift",
            help="Start samples at random positions, so that short samples serve long contexts.",
            show_default="by method",
        ),
    ] = None,
    keys_per_head: Annotated[int, typer.Option(help="Keys kept for each KV head.")] = 65_536,
    text_field: Annotated[str, typer.Option(help="Field of local JSON and parquet that holds the text.")] = "text",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write. Default: MODEL-bpcBITS.safetensors here.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False,
    revision: Revision = None,
    dtype: WeightsDtype = Dtype.auto,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="The same seed gives the same file.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; loads no weights.")] = False,
    as_json: AsJson = False,
    quiet: NoProgress = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Find the projections of a model from text and write them to one safetensors file.

    Example: bpc calibrate -m meta-llama/Llama-3.1-8B-Instruct
    """
    started = time.monotonic()
    from bpc_artifacts import check_writable, save

    if output is not None:  # before anything slow
        check_writable(output, 0, overwrite=force)
    quiet_libraries(bars=not quiet)
    import torch

    import bpc_calib
    from bpc_calib.calibration.plan import make_plan
    from bpc_calib.models.description import describe
    from bpc_calib.models.loading import load_config, load_model, load_tokenizer
    from bpc_calib.text.corpora import DEFAULT_CORPORA, HUB_CORPORA, expand, open_corpus

    device = pick_device(device)
    config, commit = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
    settings: dict[str, Any] = {
        "samples": samples,
        "sequence_length": sequence_length,
        "bits": bits,
        "method": method.value,
        "position_shift": position_shift,
        "keys_per_head": keys_per_head,
        "seed": seed,
    }
    chosen = make_plan(describe(config, revision=commit), **settings)
    target = output or Path(f"{chosen.model.id.split('/')[-1]}-bpc{bits}.safetensors")
    check_writable(target, chosen.artifact_bytes + (1 << 20), overwrite=force)
    wanted = expand(corpus or (["demo"] if model == "demo" else DEFAULT_CORPORA))
    if dry_run:
        for spec in wanted:
            if spec not in HUB_CORPORA:
                open_corpus(spec, text_field=text_field)
        weights = _meta_model(config, dtype.value, trust_remote_code)
        _print_plan(chosen, weights, target, wanted, device, as_json)
        return
    corpora = [open_corpus(spec, text_field=text_field) for spec in wanted]
    tokenizer = load_tokenizer(model, revision=commit, trust_remote_code=trust_remote_code)
    visible = not quiet and sys.stderr.isatty()
    if visible:
        note(f"Loading {chosen.model.id} on {device} ...")
    loaded = load_model(model, revision=commit, dtype=dtype.value, device=device, trust_remote_code=trust_remote_code)

    seconds = {"load": time.monotonic() - started}
    progress = bars()
    with progress if visible else nullcontext():
        tasks = {
            stage: progress.add_task(text, start=False, total=None, visible=False) for stage, text in STAGES.items()
        }
        last = time.monotonic()

        def show(stage: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            seconds[stage] = seconds.get(stage, 0.0) + now - last
            last = now
            progress.start_task(tasks[stage])
            progress.update(tasks[stage], completed=done, total=total, visible=True)

        artifact = bpc_calib.calibrate(loaded, tokenizer, corpora, chosen, progress=show)
    save(artifact, target, overwrite=force)

    on_gpu = torch.device(device).type == "cuda"
    result = {
        "output": str(target),
        "model": chosen.model.id,
        "algorithm": artifact.metadata["algorithm"],
        "device": device,
        "tokens": artifact.metadata["calibration"]["tokens"],
        "keys_per_head": artifact.metadata["calibration"]["keys_per_head"],
        "residual": artifact.metadata["metrics"]["residual"],
        "residual_by_layer": artifact.metadata["metrics"]["residual_by_layer"],
        "seconds": round(time.monotonic() - started, 1),
        "seconds_by_stage": {stage: round(spent, 1) for stage, spent in seconds.items()},
        "peak_memory_bytes": _peak_memory(),
        "peak_gpu_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }
    if as_json:
        print_json(result)
    else:
        _print_result(result)


def _peak_memory() -> int | None:
    """Of this process alone: what `getrusage` says includes, on Linux, the process that started it."""
    if sys.platform == "linux":
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def _meta_model(config: Any, dtype: str, trust_remote_code: bool) -> Any:
    """The model without its weights, in the dtype it would be loaded in."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=trust_remote_code)


def _print_plan(chosen: "Plan", weights: Any, target: Path, corpora: list[str], device: str, as_json: bool) -> None:
    parameters, kind = sum(p.numel() for p in weights.parameters()), weights.dtype
    model = chosen.model
    key_bytes = chosen.key_bytes(kind.itemsize)
    seconds = _forward_seconds(chosen, parameters, device, kind)
    plan = {
        "model": model.id,
        "revision": model.revision,
        "layers": len(model.full_layers),
        "layers_left_out": model.num_layers - len(model.full_layers),
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "bits": chosen.bits,
        "method": chosen.method.name,
        "position_shift": chosen.position_shift,
        "corpora": corpora,
        "samples": chosen.samples,
        "sequence_length": chosen.sequence_length,
        "tokens": chosen.tokens,
        "keys_per_head": chosen.keys_per_head,
        "device": device,
        "dtype": str(kind).removeprefix("torch."),
        "weights_bytes": parameters * kind.itemsize,
        "keys_bytes": key_bytes,
        "output": str(target),
        "output_bytes": chosen.artifact_bytes,
        "forward_seconds_at_least": round(seconds),
    }
    if as_json:
        print_json(plan)
        return
    rows = {
        "model": f"{model.id}{f' at {model.revision}' if model.revision else ''}",
        "layers": f"{len(model.full_layers)} of {model.num_layers} (full attention)",
        "heads": f"{model.kv_heads} KV heads of {model.head_dim}, {model.query_heads} query heads",
        "method": f"{chosen.method.name}, {chosen.bits} bits, position shift {('off', 'on')[chosen.position_shift]}",
        "text": f"{chosen.samples} samples of {chosen.sequence_length:,} tokens from {', '.join(corpora)}",
        "tokens": f"{chosen.tokens:,}",
        "keys": f"{chosen.keys_per_head:,} a head",
        "memory": f"{_size(plan['weights_bytes'])} weights ({plan['dtype']}, on {device}), {_size(key_bytes)} keys",
        "disk": f"{_size(chosen.artifact_bytes)} in {target}",
        "time": f"forward passes at least {_time(seconds)} (operations at the speed of a matrix product here)",
    }
    _print_rows("Plan (nothing was done)", rows)


def _forward_seconds(chosen: "Plan", parameters: int, device: str, dtype: Any) -> float:
    """Operations of all forward passes, over the speed of one matrix product measured now."""
    import torch

    size = 1024
    left = torch.ones(size, size, dtype=dtype, device=device)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        float((left @ left)[0, 0])  # waits for the device
        times.append(time.perf_counter() - start)
    per_second = 2 * size**3 / min(times)
    model = chosen.model
    attention = 2 * model.num_layers * model.query_heads * model.head_dim * chosen.sequence_length
    return chosen.tokens * (2 * parameters + attention) / per_second


def _print_result(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("layer", "residual")
    for layer, value in result["residual_by_layer"].items():
        table.add_row(layer, f"{value:.4f}")
    table.add_section()
    table.add_row("all", f"{result['residual']:.4f}")
    print_table(f"{residual_title(result['algorithm'])}, mean over KV heads", table)
    memory = "not known here" if result["peak_memory_bytes"] is None else _size(result["peak_memory_bytes"])
    if result["peak_gpu_memory_bytes"]:
        memory += f" and {_size(result['peak_gpu_memory_bytes'])} on the GPU"
    stages = ", ".join(f"{STAGES[stage].lower()} {_time(spent)}" for stage, spent in result["seconds_by_stage"].items())
    print(f"{result['tokens']:,} tokens, {result['keys_per_head']:,} keys a KV head")
    print(f"{_time(result['seconds'])} ({stages}), peak memory {memory}")
    print(f"Wrote {printable(result['output'])}")


def _print_rows(title: str, rows: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, printable(value))
    print_table(title, table)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s" if seconds < 3600 else f"{seconds / 3600:.1f} h"
