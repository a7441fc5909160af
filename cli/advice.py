"""Which settings fit a model on this machine at a number of tokens, and what to expect of them."""

import shlex
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
        `codes_bytes`, `bytes_beside_disk` (what stays in memory where keys and values are on disk; None on a GPU),
        `free_bytes`, `bytes_per_second` (measured), and the most tokens per second that those bytes
        allow, `tokens_per_second` and `full_tokens_per_second`; None for a mixture of experts, of which a step reads a
        part of the weights.
    """
    import torch

    from bpc_calib.backends.switch_over import sparse_from
    from bpc_calib.bench.decode import has_experts, weight_bytes_read
    from bpc_calib.bench.machine import available_memory
    from bpc_calib.bench.timing import bandwidth
    from bpc_calib.method.budget import attended
    from bpc_calib.runtime.bytes_forecast import forecast_bytes

    model, device = opened.description, torch.device(opened.device)
    tokens = tokens or min(TOKENS, model.context_limit or TOKENS)
    start = sparse_from(2 * model.kv_heads * model.head_dim * weights.dtype.itemsize, 1, model.query_heads, device)
    read = forecast_bytes(opened.config, tokens, weights.dtype, dense_layers=(), min_context=start)
    always = forecast_bytes(opened.config, tokens, weights.dtype, dense_layers=(), min_context=0)
    held = weight_bytes(weights)
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
        "bytes_beside_disk": None if device.type != "cpu" else held + always.ranking + always.sliding,
        "free_bytes": available_memory(device),
        "bytes_per_second": rate,
        "tokens_per_second": None if step is None else rate / (step + read.read),
        "full_tokens_per_second": None if step is None else rate / (step + read.full),
    }


def print_advice(found: dict[str, Any], model: str, file: str) -> None:
    """Print the settings, and the commands for the model as the user named it; `file` will hold its projections."""
    needed = found["weights_bytes"] + found["cache_bytes"] + found["codes_bytes"]
    fits = (
        "which fits" if needed < found["free_bytes"] else "which is too little: --device-map auto spreads the weights"
    )
    tokens, start = found["tokens"], found["sparse_from"]
    few = f"all tokens, since choosing pays from {start:,} tokens on"
    rule = f"{budget_text(BUDGET)} but at least {MIN_TOKENS}"
    share = f"{found['attended']:,} of them, {rule}, and all while there are fewer than {start:,}"
    held = [size_text(found[f"{name}_bytes"]) for name in ("weights", "cache", "codes", "free")]
    left = found["bytes_beside_disk"]
    disk = "" if left is None else f"; --kv-device disk:FOLDER leaves {size_text(left)} in memory"
    rows = {
        "attends to": few if found["attended"] == tokens else share,
        "memory": "weights {}, keys and values {}, codes {}; {} are free, {}".format(*held, fits) + disk,
        "speed": _speed(found),
        "projections": "calibrated once per model, as below; or -a online: found in each prompt, which takes longer",
    }
    beyond = ", beyond the model's limit" if found["beyond_the_model"] else ""
    print_rows(f"Settings for a context of {tokens:,} tokens here{beyond}: the defaults", rows)
    name = shlex.quote(printable(model))
    if not Path(file).exists():
        print(f"  bpc calibrate -m {name}")
    print(f"  bpc generate -m {name} -a {shlex.quote(printable(file))} --prompt-file FILE")


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
