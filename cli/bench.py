"""`bpc bench`: the speed of BPC on this machine, beside dense attention, the paper's pipeline and the byte floors."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from bpc_cli.arguments import (
    AsJson,
    Device,
    Dtype,
    NoProgress,
    Revision,
    TrustRemoteCode,
    WeightsDtype,
    find_artifact,
    parse_budget,
    parse_layers,
    pick_device,
    split,
)
from bpc_cli.bench_tables import show
from bpc_cli.console import bars, command, fail, print_json, printable, quiet_libraries

SHAPE = "llama-3.1-8b"
ALL = ("layer", "decode", "prefill")
LAYERS = 4  # of it, on a CPU, unless told otherwise


@command
def bench(
    parts: Annotated[
        str | None,
        typer.Option(
            help="layer, decode and prefill, or some of them. Default: all.", metavar="PART,...", show_default=False
        ),
    ] = None,
    crossover: Annotated[
        bool, typer.Option("--crossover", help="Instead: from how many tokens on sparse is faster here.")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens cached. Default: 2048,8192,32768,131072 for the layer, 32768 for decoding (on a GPU also "
            "131072); --crossover doubles up to the longest.",
            metavar="TOKENS,...",
            show_default=False,
        ),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Sequences at once.", metavar="NUMBER,...")] = "1",
    budgets: Annotated[
        str, typer.Option(help="Tokens attended: 2% or 0.02 of them, or 2048 of them.", metavar="SHARE|TOKENS,...")
    ] = "2%",
    group_sizes: Annotated[
        str | None,
        typer.Option(
            help="Query heads of a KV head, in the layer. Default: the model's.",
            metavar="NUMBER,...",
            show_default=False,
        ),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Of the layer. Default: the model's.", show_default=False)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Of the layer. Default: the model's.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder or Hub id of a causal language model, or demo.")
    ] = None,
    artifact: Annotated[
        str | None,
        typer.Option(
            "--artifact", "-a", help="Projections of bpc calibrate: a file or a Hub id. Without, random ones: as fast."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights of this shape instead of a model: llama-3.2-1b, llama-3.2-3b, llama-3.1-8b, "
            f"llama-3.1-70b, qwen3-8b. Default: {SHAPE}, on a CPU with {LAYERS} layers.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Of the shape: fewer, to fit this machine.")] = None,
    mlp: Annotated[int | None, typer.Option(help="Of the shape: a narrower MLP, with which gains are larger.")] = None,
    dense_layers: Annotated[
        str,
        typer.Option(help="Layers that attend to everything: 0,1 as a BPCCache by default; or none.", metavar="LAYERS"),
    ] = "none",
    prefill_tokens: Annotated[
        int | None, typer.Option(help="Of the prefill. Default: 1024, on a GPU 32768.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of each time, taken in turn; shown are medians.")] = 7,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the result as JSON to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this .png, .svg or .pdf (extra: plots).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    revision: Revision = None,
    dtype: WeightsDtype = Dtype.auto,
    device: Device = "auto",
    as_json: AsJson = False,
    quiet: NoProgress = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Time a step of BPC beside dense attention, the paper's pipeline and the bytes that must move.

    Everything is compared in the same run, with the same random keys. Where BPC loses, the table shows it.

    Example: bpc bench --parts layer --lengths 8192,131072 --budgets 2%,1% -o bench.json --plot bench.png
    """
    asked: dict[str, Any] = {
        "parts": ALL if parts is None else tuple(split(parts)),
        "crossover": crossover,
        "lengths": None if lengths is None else _numbers(lengths, "--lengths"),
        "batch_sizes": _numbers(batch_sizes, "--batch-sizes"),
        "budgets": tuple(dict.fromkeys(parse_budget(text, "--budgets") for text in split(budgets))),
        "group_sizes": None if group_sizes is None else _numbers(group_sizes, "--group-sizes"),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dense_layers": parse_layers(dense_layers),
        "prefill_tokens": prefill_tokens,
        "repeats": repeats,
    }
    if model is not None and (shape is not None or layers is not None or mlp is not None):
        fail("--shape, --layers and --mlp are for random weights: leave out --model")
    if crossover and parts is not None:
        fail("--crossover takes the place of the parts: leave out --parts")
    quiet_libraries(bars=not quiet, warnings=not quiet)
    from bpc_artifacts import load
    from bpc_artifacts.file import check_writable, replacing

    projections = None if artifact is None else load(find_artifact(artifact)[0])
    if output is not None:
        check_writable(output, 1 << 20, overwrite=force)
    if plot is not None:
        from bpc_calib.bench import pictures

        pictures.check(plot, force)
    import torch

    from bpc_calib.bench import Settings, check, run
    from bpc_calib.bench.machine import without_folder
    from bpc_calib.bench.shapes import random_model, shape_config
    from bpc_calib.models.loading import load_config, load_model

    device = pick_device(device)
    if model is not None:
        config, commit = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
        own = getattr(config.get_text_config(decoder=True), "dtype", None)
    else:
        if shape is None and device == "cpu":
            layers = layers or LAYERS
        config, commit, own = shape_config(shape or SHAPE, layers, mlp), None, None
    kind = getattr(torch, dtype.value) if dtype is not Dtype.auto else own or torch.bfloat16

    def make_model() -> Any:
        if model is None:
            return random_model(config, kind, torch.device(device))
        name = str(kind).removeprefix("torch.")
        return load_model(model, revision=commit, dtype=name, device=device, trust_remote_code=trust_remote_code)

    typed = " ".join(["bpc", *map(without_folder, sys.argv[1:])])
    written: list[Path] = []

    def keep(result: dict[str, Any]) -> None:
        if output is None:
            return
        with replacing(output, force or output in written) as temporary:
            temporary.write_text(json.dumps({"command": typed, **result}, indent=1) + "\n")
        written.append(output)

    settings = Settings(**asked)
    check(settings, config, projections)
    progress = bars()
    with progress if not quiet and sys.stderr.isatty() else nullcontext():
        shown = progress.add_task("Benchmarking", total=1.0)
        result = run(
            settings,
            config,
            make_model,
            projections,
            kind,
            torch.device(device),
            lambda done, what: progress.update(shown, completed=done, description=what),
            keep,
        )
    if plot is not None:
        pictures.draw(result, plot, overwrite=force)
    if as_json:
        print_json({"command": typed, **result})
        return
    show(result)
    for path in (output, plot):
        if path is not None:
            print(f"Wrote {printable(path)}")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    found = split(text)
    if not found or not all(each.isdecimal() for each in found):
        fail(f"{option} {text}: expected numbers, like 2048,8192")
    return tuple(dict.fromkeys(map(int, found)))
