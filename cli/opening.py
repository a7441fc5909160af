"""Opening a model and its artifact: the config first, so that mistakes are found before the weights are loaded."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bpc_cli.command import checked
from bpc_cli.console import fail, note
from bpc_cli.options import TrustRemoteCode
from bpc_cli.progress import working
from bpc_cli.ranks import own_device, ranks

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_calib.models.description import ModelDescription

SUFFIX = ".safetensors"  # of artifacts


def check_device(name: str) -> None:
    """Refuse what is no name of a device that could run a model; `pick_device` tries it."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:[0-9]{1,3})?", name):
        raise typer.BadParameter(f"device {name} is not known: choose auto, cpu, cuda, cuda:1 and so on, or mps")


Device = Annotated[
    str,
    typer.Option(
        help="Device that runs the model: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.",
        callback=checked(check_device),
    ),
]


@dataclass(frozen=True)
class OneDeviceOptions:
    """Which version of a model to load, and how, onto one device."""

    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model on the Hub.")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Data type of the weights; auto is the model's own, bfloat16 for a quantised GGUF file."),
    ] = "auto"
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class LoadOptions(OneDeviceOptions):
    """The same, with the choice of several devices."""

    device_map: Annotated[
        Literal["auto"] | None,
        typer.Option(help="auto spreads a large model over all GPUs, main memory and disk (needs accelerate)."),
    ] = None

    def __post_init__(self) -> None:
        """Refuse a device where several are chosen."""
        if self.device_map is not None and self.device != "auto":
            raise typer.BadParameter(f"--device-map chooses the devices: leave out --device {self.device}")


@dataclass(frozen=True)
class OpenedModel:
    """A model whose config was read and checked; its weights are not loaded yet."""

    name: str
    config: Any
    description: "ModelDescription"
    device: str
    options: OneDeviceOptions
    device_map: str | None


def open_model(name: str, options: OneDeviceOptions, *, shared: bool = False) -> OpenedModel:
    """Pick the device, then read the config of a folder, a GGUF file or a Hub id.

    `shared`: the processes of torchrun, if there are several, shard the model (tensor parallelism).
    """
    from bpc_calib.errors import InputError
    from bpc_calib.models.description import describe
    from bpc_calib.models.loading import check_packages, load_config
    from bpc_calib.models.tensor_parallel import tensor_parallel

    device_map = options.device_map if isinstance(options, LoadOptions) else None
    shared = shared and ranks() > 1
    if device_map is not None and shared:
        raise InputError("--device-map spreads a model in one process, and torchrun started several: leave it out")
    if device_map is not None and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise InputError("--device-map spreads a model over all GPUs of a machine: start one rank per machine")
    device = own_device(options.device, shared=shared) if ranks() > 1 else pick_device(options.device)
    config, commit = load_config(name, revision=options.revision, trust_remote_code=options.trust_remote_code)
    check_packages(name, config, device_map)
    if shared:
        config.distributed_config = tensor_parallel(config, ranks())
    return OpenedModel(name, config, describe(config, revision=commit), device, options, device_map)


def on_cpu(kv_device: str | None, opened: OpenedModel) -> str | None:
    """Where keys and values are to be kept, if a model on this device allows it."""
    if kv_device is not None and opened.device != "cpu":
        fail(f"--kv-device {kv_device} serves models on a CPU, and this one will be on {opened.device}: --device cpu")
    return kv_device


def open_tokenizer(opened: OpenedModel) -> Any:
    """The tokenizer, of the same commit as the config."""
    from bpc_calib.models.loading import load_tokenizer

    return load_tokenizer(
        opened.name, revision=opened.description.revision, trust_remote_code=opened.options.trust_remote_code
    )


def open_weights(opened: OpenedModel, quiet: bool, dtype: str | None = None) -> Any:
    """The model with its weights on the device; `dtype` overrides the option."""
    from bpc_calib.models.loading import load_model
    from bpc_calib.models.long_passes import LONG, slow_products

    spread = "" if opened.device_map is None else " and wherever else there is room"
    if opened.description.ranks > 1:
        spread = f" in {opened.description.ranks} processes"
    with working(f"Loading {opened.description.id} on {opened.device}{spread}", quiet):
        loaded = load_model(
            opened.name,
            config=opened.config,
            revision=opened.description.revision,
            dtype=dtype or opened.options.dtype,
            device=opened.device,
            device_map=opened.device_map,
            trust_remote_code=opened.options.trust_remote_code,
        )
    if loaded.device.type == "cpu" and (ratio := slow_products(loaded.dtype)) is not None and not quiet:
        kind = str(loaded.dtype).removeprefix("torch.")
        note(
            f"Passes of {LONG} and more tokens compute in float32, since products in {kind} take {ratio:.1f} times as "
            f"long on this processor; the weights stay {kind}"
        )
    return loaded


def pick_device(name: str) -> str:
    """A device that works here; `auto` is a GPU if there is one, else the CPU."""
    import torch

    from bpc_calib.errors import InputError

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        float(torch.zeros(1, device=name))
    except Exception as fault:
        reason = str(fault).strip().splitlines()[0]
        raise InputError(f"device {name} cannot be used: {reason}") from fault
    return name


def model_without_weights(opened: OpenedModel) -> Any:
    """The model without memory for its weights, in the data type that it would be loaded in."""
    import torch
    from transformers import AutoModelForCausalLM

    options, config = opened.options, opened.config
    own = getattr(config, "dtype", None) or torch.float32
    dtype = own if options.dtype == "auto" else getattr(torch, options.dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=options.trust_remote_code)


def weight_bytes(model: Any) -> int:
    """The bytes of all weights."""
    return sum(each.numel() * each.dtype.itemsize for each in model.parameters())


def find_artifact(name: str, revision: str | None = None, model: str = "") -> tuple[Path, str | None]:
    """The file that a path or a Hub id names, and the Hub commit (None for a path).

    A Hub id may end with its revision: `ORG/NAME@COMMIT`. `model` is what was given as model, perhaps in exchange.
    """
    from bpc_calib.models.loading import is_model

    path = Path(os.path.expanduser(name))
    if is_model(name):
        if model.endswith(SUFFIX):
            fail(f"{name} is a model, and {model} an artifact: exchange them")
        fail(f"{name} is a model, not an artifact: -m takes it")
    parts = name.partition("@")[0].split("/")
    if os.path.exists(path) or len(parts) < 2 or not all(parts) or parts[0] in (".", "..", "~"):
        if revision is not None:
            fail(f"{name} is a file, and only artifacts on the Hub have revisions: omit --revision")
        return path, None
    if len(parts) == 2 and name.endswith(SUFFIX):  # FOLDER/FILE, mistyped
        return path, None
    from bpc_calib.hub import fetch_artifact

    repository, revision = split_revision(name, revision)
    return fetch_artifact(repository, revision)


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """The Hub id and the revision of `ORG/NAME@REVISION`; `revision` is that of --revision."""
    repository, at, named = name.partition("@")
    if at and (not named or revision is not None):
        raise typer.BadParameter(f"{name}: give one revision, as {repository}@REVISION or with --revision")
    return repository, named or revision


def load_artifact(name: str, model: str | None) -> "ProjectionArtifact":
    """The artifact that a path or a Hub id names; `model` as in `find_artifact`."""
    path, _ = find_artifact(name, model=model or "")
    from bpc_artifacts import load

    return load(path)
