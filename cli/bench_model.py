"""The model that `bpc bench` measures: a real one, or random weights of a known shape."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_calib.bench.settings import SHAPES
from bpc_cli.console import fail
from bpc_cli.opening import Dtype, OneDeviceOptions, OpenedModel, open_model, open_weights, pick_device
from bpc_cli.options import MODEL_HELP, PROJECTIONS

if TYPE_CHECKING:
    import torch

__all__ = ["BenchModel", "BenchModelOptions", "check_model_options", "make_model", "open_bench_model"]

SHAPE = "llama-3.1-8b"
CPU_LAYERS = 4  # of the default shape on a CPU


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
            help=f"Shape of a model with random weights: {', '.join(SHAPES)}. Default: {SHAPE}, on a CPU with "
            f"{CPU_LAYERS} of its layers.",
            show_default=False,
        ),
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="Number of the shape's layers to keep, so that it fits this machine.")
    ] = None
    mlp: Annotated[int | None, typer.Option(help="Width of the shape's MLP; gains are larger with a narrower MLP.")] = (
        None
    )


@dataclass(frozen=True)
class BenchModel:
    """A model whose config is known; its weights are not loaded or made yet."""

    config: Any
    dtype: "torch.dtype"
    device: "torch.device"
    opened: OpenedModel | None  # None: random weights


def check_model_options(options: BenchModelOptions) -> None:
    """Refuse options of random weights together with a model."""
    if options.model is not None and (options.shape, options.layers, options.mlp) != (None, None, None):
        fail("--shape, --layers and --mlp are for random weights: leave out --model")


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

        device, layers = pick_device(load.device), options.layers
        if layers is None and options.shape is None and device == "cpu":
            layers = CPU_LAYERS
        config = shape_config(options.shape or SHAPE, layers, options.mlp)
    dtype = getattr(torch, load.dtype.value) if load.dtype is not Dtype.auto else own or torch.bfloat16
    return BenchModel(config, dtype, torch.device(device), opened)


def make_model(model: BenchModel, quiet: bool) -> Any:
    """Load the weights, or make them at random."""
    if model.opened is not None:
        return open_weights(model.opened, quiet, dtype=str(model.dtype).removeprefix("torch."))
    from bpc_calib.bench.random_models import random_model

    return random_model(model.config, model.dtype, model.device)
