"""Which settings fit a model on this machine at a number of tokens, and what to expect of them."""

import shlex
import shutil
from pathlib import Path
from typing import Any

from bpc_calib.method.defaults import BUDGET, MIN_TOKENS, budget_text
from bpc_cli.console import print_rows, printable, size_text
from bpc_cli.opening import OpenedModel, weight_bytes

TOKENS = 32_768  # unless the user says how many, or the model takes fewer
WORTH = 1.1  # times as many tokens per second as full attention, by bytes


def advise(opened: OpenedModel, weights: Any, tokens: int | None) -> dict[str, Any]:
    """Settings for a context of so many tokens, and what it takes.

    Args:
        opened: the model.
        weights: the same without memory for its weights.
        tokens: cached tokens; None: as many as the model takes, at most `TOKENS`.

    Returns:
        `tokens`, `attended` (per step, the mean over the KV heads), `sparse_from`, `weights_bytes`, `cache_bytes`,
        `codes_bytes`, `free_bytes`, the `most_tokens` that fit there, `kv_device` (see `_apart`), `bytes_per_second`
        (measured), and the most tokens per second that those bytes allow, `tokens_per_second` and
        `full_tokens_per_second`; None for a mixture of experts, of which a step reads a part of the weights.
    """
    import torch

    from bpc_calib.backends.sizes import MOST_TOKENS
    from bpc_calib.backends.switch_over import sparse_from
    from bpc_calib.bench.decode import has_experts, weight_bytes_read
    from bpc_calib.bench.machine import available_memory
    from bpc_calib.bench.timing import bandwidth
    from bpc_calib.method.budget import attended
    from bpc_calib.runtime.bytes_forecast import forecast_bytes
    from bpc_calib.runtime.layers import costs_of, own_from

    model, device = opened.description, torch.device(opened.device)
    tokens = tokens or min(TOKENS, model.context_limit or TOKENS)
    token = 2 * model.kv_heads * model.head_dim * weights.dtype.itemsize
    start = sparse_from(token, 1, model.query_heads, device, costs_of(own_from(device, weights.dtype)))
    read = forecast_bytes(opened.config, tokens, weights.dtype, dense_layers=(), min_context=start)
    always, many = (
        forecast_bytes(opened.config, each, weights.dtype, dense_layers=(), min_context=0)
        for each in (tokens, MOST_TOKENS)
    )
    held, free = weight_bytes(weights), available_memory(device)
    rate = bandwidth(device)["bytes_per_second"]
    step = None if has_experts(opened.config) else weight_bytes_read(weights)
    return {
        "tokens": tokens,
        "beyond_the_model": model.context_limit is not None and tokens > model.context_limit,
        "attended": attended(tokens, BUDGET, MIN_TOKENS) if tokens >= start else tokens,
        "sparse_from": start,
        "weights_bytes": held,
        "cache_bytes": read.full,
        "codes_bytes": always.ranking,
        "free_bytes": free,
        "most_tokens": _most(free - held - many.sliding, many.full - many.sliding + many.ranking),
        "kv_device": _apart(device, held, free, always, many),
        "bytes_per_second": rate,
        "tokens_per_second": None if step is None else rate / (step + read.read),
        "full_tokens_per_second": None if step is None else rate / (step + read.full),
    }


def _apart(device: Any, held: int, free: int, here: Any, many: Any) -> dict[str, Any]:
    """What lies where with `--kv-device`: on a GPU keys and values go to main memory, on a CPU to disk.

    Args:
        device: of the model.
        held: bytes of the weights.
        free: bytes of the device.
        here: what a step reads at the tokens of the context.
        many: the same at `MOST_TOKENS`.

    Returns:
        `name` as the option takes it, `stays_bytes` (weights, codes and windows), `moves_bytes` (keys and values),
        `free_bytes` where they go, `fits`, and the `most_tokens` that fit.
    """
    import torch

    from bpc_calib.bench.machine import available_memory

    on_gpu = device.type == "cuda"
    below = available_memory(torch.device("cpu")) if on_gpu else shutil.disk_usage(".").free
    stays, moves = held + here.ranking + here.sliding, here.full - here.sliding
    return {
        "name": "cpu" if on_gpu else "disk:FOLDER",
        "stays_bytes": stays,
        "moves_bytes": moves,
        "free_bytes": below,
        "fits": stays < free and moves < below,
        "most_tokens": min(_most(free - held - many.sliding, many.ranking), _most(below, many.full - many.sliding)),
    }


def _most(room: int, needed: int) -> int:
    """How many tokens fit in so many bytes, if `MOST_TOKENS`, the most that kernels serve, need `needed`."""
    from bpc_calib.backends.sizes import MOST_TOKENS

    return max(0, min(MOST_TOKENS, room * MOST_TOKENS // max(1, needed)))


def print_advice(found: dict[str, Any], model: str, file: str) -> None:
    """Print the settings, and the commands for the model as the user named it; `file` will hold its projections."""
    needed, apart = found["weights_bytes"] + found["cache_bytes"] + found["codes_bytes"], found["kv_device"]
    here, there = ("this GPU", "in main memory") if apart["name"] == "cpu" else ("memory", "on disk, in this folder")
    option, enough = f"--kv-device {apart['name']}", needed < found["free_bytes"]
    if apart["fits"]:
        little = f"{option} fits"
    elif apart["name"] == "cpu" and found["weights_bytes"] >= found["free_bytes"]:
        little = "--device-map auto spreads the weights"
    else:
        little = f"with {option} {apart['most_tokens']:,} tokens fit"
    fits = "which fits" if enough else f"which is too little: {little}"
    tokens, start = found["tokens"], found["sparse_from"]
    few = f"all tokens, since choosing pays from {start:,} tokens on"
    rule = f"{budget_text(BUDGET)} but at least {MIN_TOKENS}"
    share = f"{found['attended']:,} of them, {rule}, and all while there are fewer than {start:,}"
    held = [size_text(found[f"{name}_bytes"]) for name in ("weights", "cache", "codes", "free")]
    rows = {
        "attends to": few if found["attended"] == tokens else share,
        "memory": "weights {}, keys and values {}, codes {}; {} are free, {}".format(*held, fits),
        "room": f"for {found['most_tokens']:,} tokens in {here}, for {apart['most_tokens']:,} with {option}",
        **({} if enough else {option: _placed(apart, here, there)}),
        "speed": _speed(found),
        "projections": "calibrated once per model, as below; or -a online: found in each prompt, which takes longer",
    }
    beyond = ", beyond the model's limit" if found["beyond_the_model"] else ""
    print_rows(f"Settings for a context of {tokens:,} tokens here{beyond}: the defaults", rows)
    name = shlex.quote(printable(model))
    if not Path(file).exists():
        print(f"  bpc calibrate -m {name}")
    needs = f" {option}" if apart["fits"] and not enough else ""
    print(f"  bpc generate -m {name} -a {shlex.quote(printable(file))} --prompt-file FILE{needs}")


def _placed(apart: dict[str, Any], here: str, there: str) -> str:
    """What lies where, in words."""
    stays, moves, free = (size_text(apart[f"{name}_bytes"]) for name in ("stays", "moves", "free"))
    return f"weights and codes, {stays}, in {here}; keys and values, {moves}, {there}, where {free} are free"


def _speed(found: dict[str, Any]) -> str:
    """What to expect, in words."""
    if found["tokens_per_second"] is None:
        return "not known beforehand for a mixture of experts: bpc generate --compare measures it"
    ours, full = found["tokens_per_second"], found["full_tokens_per_second"]
    shown, others = (f"{each:,.0f}" if each >= 10 else f"{each:.2g}" for each in (ours, full))
    text = (
        f"at most {shown} tokens/s, and {others} with full attention, by the bytes of a step and the "
        f"{size_text(found['bytes_per_second'])}/s that this memory transfers"
    )
    return text if ours > WORTH * full else f"{text}: BPC gains little at this length"
