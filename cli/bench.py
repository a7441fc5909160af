"""`bpc bench`: the speed of BPC on this machine, beside dense attention and the byte floors."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_calib.bench.settings import (
    DECODE_LENGTHS,
    LENGTHS,
    PARTS,
    PREFILL_TOKENS,
    SHAPES,
    Settings,
    check_settings,
    shape_settings,
)
from bpc_cli.bench_tables import print_benchmark
from bpc_cli.command import checked, command, usage
from bpc_cli.console import print_json, printable, quiet_libraries
from bpc_cli.opening import OneDeviceOptions, load_artifact, open_model, open_weights, pick_device
from bpc_cli.options import (
    BUDGET_HELP,
    LAYERS_HELP,
    MODEL_HELP,
    PROJECTIONS,
    AsJson,
    Force,
    NoCompile,
    Output,
    Quiet,
    parse_budgets,
    parse_counts,
    parse_layers,
    split,
)
from bpc_cli.progress import progress_bar
from bpc_cli.result_file import open_result_file

if TYPE_CHECKING:
    import torch

    from bpc_calib.bench.measure import Subject

SHAPE = "llama-3.1-8b"


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured; None leaves it to the model or the machine."""

    parts: Annotated[
        str | None,
        typer.Option(help=f"Parts to measure: {', '.join(PARTS)}. Default: all.", metavar="PART,..."),
    ] = None
    crossover: Annotated[
        bool,
        typer.Option(
            "--crossover", help="Instead of the parts, find the context length from which BPC is faster than dense."
        ),
    ] = False
    lengths: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens cached. Default: {_listed(LENGTHS)}; for decoding on a GPU "
            f"{_listed(DECODE_LENGTHS['cuda'])}. --crossover doubles the length up to the longest.",
            metavar="TOKENS,...",
            callback=checked(parse_counts),
        ),
    ] = None
    batch_sizes: Annotated[
        str,
        typer.Option(help="Sequences decoded at once.", metavar="NUMBER,...", callback=checked(parse_counts)),
    ] = "1"
    budgets: Annotated[
        str, typer.Option(help=BUDGET_HELP, metavar="SHARE|TOKENS,...", callback=checked(parse_budgets))
    ] = "2%"
    dense_layers: Annotated[
        str | None,
        typer.Option(
            help=f"{LAYERS_HELP} Default: as in bpc generate.",
            metavar="LAYERS",
            callback=checked(parse_layers),
        ),
    ] = None
    no_compile: NoCompile = False
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of the prefill. Default: {PREFILL_TOKENS['cpu']}, on a GPU {PREFILL_TOKENS['cuda']}."
        ),
    ] = None
    repeats: Annotated[int, typer.Option(help="Number of measurements; the tables show their medians.")] = 7

    def __post_init__(self) -> None:
        """Refuse what cannot be measured on any model."""
        if self.crossover and self.parts is not None:
            raise typer.BadParameter("--crossover takes the place of the parts: leave out --parts")
        with usage():
            check_settings(self.settings())

    def settings(self) -> Settings:
        """The same options, parsed."""
        return Settings(
            parts=PARTS if self.parts is None else tuple(split(self.parts)),
            crossover=self.crossover,
            lengths=None if self.lengths is None else parse_counts(self.lengths),
            batch_sizes=parse_counts(self.batch_sizes),
            budgets=parse_budgets(self.budgets),
            dense_layers=None if self.dense_layers is None else parse_layers(self.dense_layers),
            compiled=not self.no_compile,
            prefill_tokens=self.prefill_tokens,
            repeats=self.repeats,
        )


@dataclass(frozen=True)
class BenchModelOptions:
    """Which model is measured."""

    model: Annotated[
        str | None, typer.Option("--model", "-m", help=f"{MODEL_HELP} Default: random weights, see --shape.")
    ] = None
    artifact: Annotated[
        str | None,
        typer.Option(
            "--artifact", "-a", help=f"{PROJECTIONS} Default: random projections, with which steps take the same time."
        ),
    ] = None
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"Shape of a model with random weights: {', '.join(SHAPES)}; or such as 8x128x4 (KV heads, head "
            f"dimension, query heads per KV head). Default: {SHAPE}. On a CPU it has as many layers as memory "
            "holds, and speeds are those of all layers.",
            metavar="NAME|HEADSxDIMxGROUP",
            callback=checked(shape_settings),
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse two models."""
        if self.model is not None and self.shape is not None:
            raise typer.BadParameter("--shape is for random weights: leave out --model")


def open_subject(options: BenchModelOptions, load: OneDeviceOptions, quiet: bool, settings: Settings) -> "Subject":
    """Read the config of the model, or make that of the shape, with as many layers as memory holds."""
    import torch

    from bpc_calib.bench.measure import Subject

    wanted = None if load.dtype == "auto" else getattr(torch, load.dtype)
    artifact = None if options.artifact is None else load_artifact(options.artifact, options.model)
    if options.model is None:
        from bpc_calib.bench.random_models import random_model

        device, dtype = torch.device(pick_device(load.device)), wanted or torch.bfloat16
        config, layers = _shape(options.shape or SHAPE, settings, dtype, device)
        return Subject(config, lambda: random_model(config, dtype, device), dtype, device, artifact, layers)
    opened = open_model(options.model, load)
    dtype = wanted or getattr(opened.config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    name, device = str(dtype).removeprefix("torch."), torch.device(opened.device)
    return Subject(opened.config, lambda: open_weights(opened, quiet, dtype=name), dtype, device, artifact)


def _shape(name: str, settings: Settings, dtype: "torch.dtype", device: "torch.device") -> tuple[Any, int]:
    """The config of a shape for this device, and the layers of the whole model."""
    from bpc_calib.bench.decode import fitting_layers
    from bpc_calib.bench.random_models import shape_config

    config = shape_config(name)
    whole = config.num_hidden_layers
    if device.type == "cpu" and {"decode", "prefill"} & set(settings.parts) and not settings.crossover:
        longest = max(settings.lengths or DECODE_LENGTHS["cpu"])
        make = partial(shape_config, name)
        config = make(fitting_layers(make, whole, max(settings.batch_sizes), longest, dtype))
    return config, whole


@command
def bench(
    *,
    measured: MeasureOptions,
    subject: BenchModelOptions,
    output: Output = None,
    force: Force = False,
    load: OneDeviceOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time a step of BPC beside full attention.

    Everything is compared in the same run, with the same random keys. Where BPC loses, the table shows it.

    Example: bpc bench --parts layer --lengths 8192,131072 --budgets 2%,1% -o bench.json
    """
    if subject.model is None and load.revision is not None:
        raise typer.BadParameter("--revision is that of a model: give --model")
    settings = measured.settings()
    quiet_libraries(quiet=quiet)
    write = open_result_file(output, force, frozenset({"settings", "machine"}))
    from bpc_calib.bench.machine import without_folder
    from bpc_calib.bench.measure import check, run

    opened = open_subject(subject, load, quiet, settings)
    check(settings, opened.config, opened.artifact)
    typed = {"command": " ".join(["bpc", *map(without_folder, sys.argv[1:])])}

    def keep(result: dict[str, Any]) -> None:
        write(typed | result)

    with progress_bar("Benchmarking", quiet) as progress:
        result = run(settings, opened, progress, keep)
    if as_json:
        print_json(typed | result)
        return
    print_benchmark(result)
    if output is not None:
        print(f"Wrote {printable(output)}")
