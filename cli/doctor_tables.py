"""The result of `bpc doctor` as tables."""

from typing import Any

from bpc_cli.console import print_rows, print_text_table, printable
from bpc_cli.quantities import heads_text, size_text
from bpc_cli.text_table import TextTable

__all__ = ["print_doctor"]

WIDENED = "long passes compute in float32, the weights stay as they are"
CUDA = "install it as https://pytorch.org/get-started/locally/ says"


def print_doctor(found: dict[str, Any], name: str | None) -> None:
    """Print everything on about one screen; `name` is what the model was called."""
    if "model" in found:
        _print_model(found["model"], found["machine"], str(name))
    _print_machine(found)
    if "model" not in found:
        _print_core(found["installation"]["core"])
    _print_missing(found["installation"]["extras"], found["machine"])


def _print_model(model: dict[str, Any], machine: dict[str, Any], name: str) -> None:
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
        "its time": f"measure it: bpc calibrate -m {name} --dry-run",
        "faster from": f"not measured; measure it: bpc bench -m {name} --crossover",
    }
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
        cells = [size_text(row[key]) for key in shown]
        lines.append(
            (tokens, size_text(row["full"]), size_text(row["read"]), f"{row['read'] / row['full']:.0%}", *cells)
        )
    columns = ("cached tokens", "full attention", "BPC", "share", *shown.values())
    title = f"KV bytes that each new token reads, {model['dtype']}, with the defaults of bpc generate"
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
        "CPU": f"{machine['cpu']}, {machine['cores']} cores",
        "GPU": gpu,
        "free": f"{free}, {size_text(machine['free_disk_bytes'])} of disk in this folder",
        **({} if slow is None else {"bfloat16": f"products take {slow:.1f} times as long as in float32: {WIDENED}"}),
        "Hub": f"{machine['hub']['address']} {reachable[machine['hub']['reachable']]}",
        "bpc": f"{machine['versions']['bpc-calib']}, Python {machine['python']}",
        **({"untested": "; ".join(machine["untested"])} if machine["untested"] else {}),
    }
    print_rows("This machine", rows)


def _print_core(core: dict[str, Any]) -> None:
    rows = [(name, each["installed"], each["needed"]) for name, each in core.items()]
    print_text_table(TextTable("Installed", ("package", "version", "needed"), rows))


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
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
