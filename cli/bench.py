"""`bpc bench`: the speed of BPC on this machine, beside dense attention, the paper's pipeline and the byte floors."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_calib.bench.settings import DECODE_LENGTHS, LENGTHS, PARTS, PREFILL_TOKENS, SHAPES, Settings
from bpc_cli.bench_tables import print_benchmark
from bpc_cli.command import command
from bpc_cli.console import fail, print_json, printable, quiet_libraries
from bpc_cli.opening import Dtype, OneDeviceOptions, OpenedModel, load_artifact, open_model, open_weights, pick_device
from bpc_cli.options import (
    BUDGET_HELP,
    DENSE_LAYERS,
    MODEL_HELP,
    PROJECTIONS,
    AsJson,
    DenseLayers,
    Force,
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

SHAPE, CPU_LAYERS = "llama-3.1-8b", 4


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured; None leaves it to the model or the machine."""

    parts: Annotated[
        str | None,
        typer.Option(
            help=f"Parts to measure: {', '.join(PARTS)}. Default: all.", metavar="PART,...", show_default=False
        ),
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
            help=f"Tokens cached. Default: {_listed(LENGTHS)} for the layer, {_listed(DECODE_LENGTHS['cpu'])} for "
            f"decoding (on a GPU {_listed(DECODE_LENGTHS['cuda'])}). --crossover doubles the length up to the longest.",
            metavar="TOKENS,...",
            show_default=False,
        ),
    ] = None
    batch_sizes: Annotated[str, typer.Option(help="Sequences decoded at once.", metavar="NUMBER,...")] = "1"
    budgets: Annotated[str, typer.Option(help=BUDGET_HELP, metavar="SHARE|TOKENS,...")] = "2%"
    dense_layers: DenseLayers = DENSE_LAYERS
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of the prefill. Default: {PREFILL_TOKENS['cpu']}, on a GPU {PREFILL_TOKENS['cuda']}.",
            show_default=False,
        ),
    ] = None
    repeats: Annotated[int, typer.Option(help="Number of measurements; the tables show their medians.")] = 7

    def settings(self) -> Settings:
        """The same options, parsed."""
        return Settings(
            parts=PARTS if self.parts is None else tuple(split(self.parts)),
            crossover=self.crossover,
            lengths=None if self.lengths is None else parse_counts(self.lengths, "--lengths"),
            batch_sizes=parse_counts(self.batch_sizes, "--batch-sizes"),
            budgets=parse_budgets(self.budgets),
            dense_layers=parse_layers(self.dense_layers),
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
            f"dimension, query heads per KV head). Default: {SHAPE}. On a CPU it has {CPU_LAYERS} layers.",
            metavar="NAME|HEADSxDIMxGROUP",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class BenchModel:
    """A model whose config is known; its weights are not loaded or made yet."""

    config: Any
    dtype: "torch.dtype"
    device: "torch.device"
    opened: OpenedModel | None  # None: random weights


def open_bench_model(options: BenchModelOptions, load: OneDeviceOptions) -> BenchModel:
    """Read the config of the model, or make that of the shape."""
    import torch

    own, opened = None, None
    if options.model is not None:
        opened = open_model(options.model, load)
        device, config = opened.device, opened.config
        own = getattr(config.get_text_config(decoder=True), "dtype", None)
    else:
        from bpc_calib.bench.random_models import shape_config

        device = pick_device(load.device)
        config = shape_config(options.shape or SHAPE, CPU_LAYERS if device == "cpu" else None)
    dtype = getattr(torch, load.dtype.value) if load.dtype is not Dtype.auto else own or torch.bfloat16
    return BenchModel(config, dtype, torch.device(device), opened)


def make_model(model: BenchModel, quiet: bool) -> Any:
    """Load the weights, or make them at random."""
    if model.opened is not None:
        return open_weights(model.opened, quiet, dtype=str(model.dtype).removeprefix("torch."))
    from bpc_calib.bench.random_models import random_model

    return random_model(model.config, model.dtype, model.device)


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
    """Time a step of BPC beside dense attention, the paper's pipeline and the bytes that must move.

    Everything is compared in the same run, with the same random keys. Where BPC loses, the table shows it.

    Example: bpc bench --parts layer --lengths 8192,131072 --budgets 2%,1% -o bench.json
    """
    settings = measured.settings()
    if subject.model is not None and subject.shape is not None:
        fail("--shape is for random weights: leave out --model")
    if measured.crossover and measured.parts is not None:
        fail("--crossover takes the place of the parts: leave out --parts")
    quiet_libraries(quiet=quiet, warnings=not quiet)
    projections = None if subject.artifact is None else load_artifact(subject.artifact)
    write = open_result_file(output, force, frozenset({"settings", "machine"}))
    from bpc_calib.bench.machine import without_folder
    from bpc_calib.bench.measure import check, run

    model = open_bench_model(subject, load)
    check(settings, model.config, projections)
    typed = {"command": " ".join(["bpc", *map(without_folder, sys.argv[1:])])}

    def keep(result: dict[str, Any]) -> None:
        write(typed | result)

    with progress_bar("Benchmarking", quiet) as progress:
        result = run(
            settings,
            model.config,
            lambda: make_model(model, quiet),
            projections,
            model.dtype,
            model.device,
            progress,
            keep,
        )
    if as_json:
        print_json(typed | result)
        return
    print_benchmark(result)
    if output is not None:
        print(f"Wrote {printable(output)}")
