"""`bpc doctor`: whether a model is served, what BPC will do with it here, and what is missing."""

import shutil
from typing import Annotated, Any

import typer

from bpc_cli.command import command
from bpc_cli.console import print_json
from bpc_cli.doctor_model import model_facts
from bpc_cli.doctor_tables import print_doctor
from bpc_cli.installation import check_core, installation
from bpc_cli.libraries import quiet_libraries
from bpc_cli.opening import OneDeviceOptions, open_model, pick_device
from bpc_cli.options import MODEL_HELP, AsJson


@command
def doctor(
    *,
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)] = None,
    load: OneDeviceOptions,
    as_json: AsJson = False,
) -> None:
    """Say whether BPC serves a model and what it will do with it on this machine, without loading any weights.

    Without --model, check the installation alone. The exit status is 1 if the model is not served; one line says why.

    Example: bpc doctor -m Qwen/Qwen3-8B
    """
    quiet_libraries(warnings=False)
    installed = installation()
    check_core(installed)
    opened = None if model is None else open_model(model, load)
    found = {
        "installation": installed,
        "machine": _machine(pick_device(load.device) if opened is None else opened.device),
        **({} if opened is None else {"model": model_facts(opened)}),
    }
    if as_json:
        print_json(found)
    else:
        print_doctor(found, model)


def _machine(device: str) -> dict[str, Any]:
    """What is here to run on, and which backend will."""
    import torch

    from bpc_calib.backends.dispatch import backend, compiled, lacking
    from bpc_calib.bench.machine import available_memory, machine
    from bpc_calib.compat import untested
    from bpc_calib.models.long_passes import slow_products

    where, facts = torch.device(device), machine()
    name = backend(where)
    blind = facts["gpu"] is None and shutil.which("nvidia-smi") is not None
    return {
        **{key: facts[key] for key in ("cpu", "cores", "gpu", "python", "versions")},
        "device": device,
        "backend": name,
        "lacking": lacking(compiled(where), where) if name == "torch" else None,
        "gpu_unseen": blind,
        "slow_bfloat16": slow_products(torch.bfloat16) if where.type == "cpu" else None,
        "untested": untested(),
        "free_memory_bytes": available_memory(torch.device("cpu")),
        "free_gpu_memory_bytes": available_memory(where) if where.type == "cuda" else None,
        "free_disk_bytes": shutil.disk_usage(".").free,
        "hub": _hub(),
    }


def _hub() -> dict[str, Any]:
    """The address of the Hub, and whether it answers; None: offline mode forbids to ask."""
    from huggingface_hub import constants

    from bpc_calib.hub import online

    return {"address": constants.ENDPOINT, "reachable": None if constants.HF_HUB_OFFLINE else online()}
