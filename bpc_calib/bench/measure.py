"""Run the benchmark: check the settings, measure every part, and return the result with all that explains it."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from bpc_artifacts import ProjectionArtifact
from bpc_calib.backends import dispatch, limits
from bpc_calib.bench import decode, prefill
from bpc_calib.bench.crossover import SHORTEST, compared, find_crossover
from bpc_calib.bench.inputs import LayerShape, working_sets
from bpc_calib.bench.layer import compile_seconds, layer_rows
from bpc_calib.bench.machine import machine
from bpc_calib.bench.random_models import random_artifact
from bpc_calib.bench.settings import DECODE_LENGTHS, LENGTHS, PARTS, PREFILL_TOKENS, Settings
from bpc_calib.bench.timing import bandwidth, reason
from bpc_calib.errors import BPCError, InputError
from bpc_calib.method.budget import attended
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.rules import ranking_defaults

__all__ = ["check", "run"]

PROMPT = 32768  # tokens, for hashing alone
FEWEST, MOST = 16, limits.MOST_TOKENS  # tokens

Progress = Callable[[float, str], None]
Load = Callable[[], Any]
Keep = Callable[[dict[str, Any]], None]


def check(settings: Settings, config: Any, artifact: ProjectionArtifact | None) -> None:
    """Raise a `BPCError` for settings that cannot be measured, before any work."""
    for name in settings.parts:
        if name not in PARTS:
            raise InputError(f"unknown part {name!r}: the parts are {', '.join(PARTS)}")
    if not settings.parts:
        raise InputError("--parts: give at least one")
    for name, values, least, most in (
        ("--lengths", settings.lengths, FEWEST, MOST - 1),
        ("--prefill-tokens", _one(settings.prefill_tokens), FEWEST, MOST - 1),
        ("--batch-sizes", settings.batch_sizes, 1, 4096),
        ("--repeats", (settings.repeats,), 1, 1000),
    ):
        if values is not None and not values:
            raise InputError(f"{name}: give at least one")
        for value in values or ():
            if not least <= value <= most:
                raise InputError(f"{name} must be {least:,} to {most:,}, not {value:,}")
    if not settings.budgets:
        raise InputError("--budgets: give at least one")
    for budget in settings.budgets:
        attended(1, budget)
    if settings.crossover and max(settings.lengths or LENGTHS) < SHORTEST:
        raise InputError(f"--crossover starts at {SHORTEST} tokens: give a longer --lengths")
    BPCCache(config, artifact, dense_layers=settings.dense_layers)


def run(
    settings: Settings,
    config: Any,
    load: Load,
    artifact: ProjectionArtifact | None,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda share, what: None,
    keep: Keep = lambda result: None,
) -> dict[str, Any]:
    """Measure all parts of the settings, or the crossover.

    Args:
        config: config of the model whose shape is measured.
        load: returns the model; called only if a part needs one.
        artifact: the model's projections; None: random ones.
        progress: called with the finished share and a description of the current work.
        keep: called with the partial result after every measurement, and with the final result.

    Returns:
        `device`, `backend`, `machine`, `settings`, `memory_bandwidth`, `compile_seconds` if notable, and one entry per
        part of the settings: `layer`, `decode`, `prefill`, or `crossover`. `left_out` lists `what` could not be
        measured, with the reason as `note`.

    Raises:
        BPCError: `check` failed, something does not fit in memory, or nothing could be measured.
    """
    check(settings, config, artifact)
    began = time.monotonic()
    description = describe(config)
    group = description.query_heads // description.kv_heads
    base = LayerShape(1, description.kv_heads, group, description.head_dim, FEWEST, dtype)
    kind = "cuda" if device.type == "cuda" else "cpu"
    lengths = settings.lengths or LENGTHS
    decode_lengths = settings.lengths or DECODE_LENGTHS[kind]
    prefill_tokens = settings.prefill_tokens or PREFILL_TOKENS[kind]
    shapes = [
        replace(base, batch=batch, tokens=tokens)
        for batch in settings.batch_sizes
        for tokens in ((max(lengths),) if settings.crossover else lengths)
    ]
    if settings.crossover or "layer" in settings.parts:
        for shape in shapes:
            working_sets(shape, shape.tokens, device)
    if "decode" in settings.parts and not settings.crossover:
        weights = decode.total_bytes(config, dtype)
        for batch in settings.batch_sizes:
            for tokens in decode_lengths:
                decode.check_memory(config, weights, batch, tokens, dtype, device)
    resolved = asdict(settings) | {
        "lengths": lengths, "decode_lengths": decode_lengths, "prefill_tokens": prefill_tokens, "group_size": group,
        "kv_heads": base.kv_heads, "head_dim": base.dim, "dtype": str(dtype).removeprefix("torch."),
        "min_tokens": 128,
    }  # fmt: skip
    resolved |= ranking_defaults(artifact)  # for decoding; a single layer uses the defaults of calibrated projections
    result: dict[str, Any] = {
        "device": str(device),
        "backend": dispatch.backend(device),
        "machine": machine(),
        "settings": resolved,
    }
    progress(0.0, "memory bandwidth")
    result["memory_bandwidth"] = bandwidth(device)
    rate = result["memory_bandwidth"]["bytes_per_second"]
    if (seconds := compile_seconds(replace(base, tokens=256), device)) is not None:
        result["compile_seconds"] = seconds
    if settings.crossover:
        measured = _crossovers(settings, shapes, rate, device, progress, result, keep)
    else:
        measured = _parts(settings, config, load, artifact, base, shapes, result, progress, keep)
    if not measured:
        raise BPCError("; ".join(f"{missing['what']}: {missing['note']}" for missing in result["left_out"]))
    progress(1.0, "done")
    result["seconds"] = round(time.monotonic() - began, 1)
    keep(result)
    return result


def _parts(
    settings: Settings,
    config: Any,
    load: Load,
    artifact: ProjectionArtifact | None,
    base: LayerShape,
    shapes: list[LayerShape],
    result: dict[str, Any],
    progress: Progress,
    keep: Keep,
) -> bool:
    """Add every part to the result; return whether anything was measured."""
    resolved, rate, device = result["settings"], result["memory_bandwidth"]["bytes_per_second"], result["device"]
    steps = _steps(settings, shapes, resolved["decode_lengths"], resolved["prefill_tokens"])
    done, total = 0.0, sum(weight for _, _, weight in steps)
    model = None
    for part in PARTS:
        if part in settings.parts:
            result[part] = [] if part == "layer" else {"rows": []}
    measured = False
    for part, what, weight in steps:
        progress(done / total, _say(part, what))
        try:
            if part == "layer":
                result[part] += layer_rows(what, settings.budgets, rate, settings.repeats, torch.device(device))
            else:
                if model is None:
                    model, projections = load(), artifact or random_artifact(config)
                facts = _model_facts(model, describe(config), artifact, resolved["decode_lengths"])
                rows = result[part]["rows"]
                result[part] = facts | {"rows": rows}
                for row in _of_model(part, model, projections, what, settings, base, rate, torch.device(device)):
                    rows.append(row)
            measured = True
        except Exception as error:
            result.setdefault("left_out", []).append({"what": _say(part, what), "note": reason(error)})
        keep(result)
        done += weight
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    return measured


def _one(value: int | None) -> tuple[int, ...] | None:
    return None if value is None else (value,)


def _steps(
    settings: Settings, shapes: list[LayerShape], decode_lengths: tuple[int, ...], prefill_tokens: int
) -> list[tuple[str, Any, float]]:
    """Return the measurements in order, each with its part and its approximate relative duration."""
    steps: list[tuple[str, Any, float]] = []
    if "layer" in settings.parts:
        steps += [("layer", shape, 60_000 + shape.batch * shape.tokens) for shape in shapes]
    if "decode" in settings.parts:
        steps += [
            ("decode", (batch, tokens), 60_000 + batch * tokens)
            for batch in settings.batch_sizes
            for tokens in decode_lengths
        ]
    if "prefill" in settings.parts:
        steps.append(("prefill", prefill_tokens, 100_000))
    return steps


def _say(part: str, what: Any) -> str:
    if part == "layer":
        return f"layer, {what.tokens:,} tokens"
    return f"decode, {what[1]:,} tokens" if part == "decode" else f"prefill, {what:,} tokens"


def _of_model(
    part: str,
    model: Any,
    artifact: ProjectionArtifact,
    what: Any,
    settings: Settings,
    base: LayerShape,
    rate: float,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    if part == "decode":
        batch, tokens = what
        decode.check_memory(model.config, 0, batch, tokens, model.dtype, device)
        yield from decode.decode_rows(
            model, artifact, batch, tokens, settings.budgets, settings.dense_layers, rate, settings.repeats
        )
        return
    yield prefill.prefill_row(model, artifact, what, settings.dense_layers, math.ceil(settings.repeats / 3))
    for tokens in sorted({what, *(settings.lengths or (PROMPT,))}):
        yield prefill.hashing_row(replace(base, tokens=tokens), math.ceil(settings.repeats / 3), device)


def _crossovers(
    settings: Settings,
    shapes: list[LayerShape],
    rate: float,
    device: torch.device,
    progress: Progress,
    result: dict[str, Any],
    keep: Keep,
) -> bool:
    """Add every crossover to the result; return whether anything was measured."""
    result["crossover"] = []
    cases = [(shape, budget) for shape in shapes for budget in settings.budgets]
    for i, (shape, budget) in enumerate(cases):

        def measure(tokens: int, i: int = i, shape: LayerShape = shape, budget: float | int = budget) -> dict[str, Any]:
            walked = math.log2(tokens / SHORTEST) / max(1.0, math.log2(shape.tokens / SHORTEST))
            progress((i + 0.9 * min(1.0, walked)) / len(cases), f"crossover, {tokens:,} tokens")
            return compared(shape, tokens, budget, rate, settings.repeats, device)

        about = {"batch": shape.batch, "group": shape.group, "budget": budget}
        try:
            result["crossover"].append(about | find_crossover(measure, shape.tokens))
        except Exception as error:
            what = f"crossover, batch {shape.batch}, group {shape.group}, budget {budget}"
            result.setdefault("left_out", []).append({"what": what, "note": reason(error)})
        keep(result)
    return bool(result["crossover"])


def _model_facts(
    model: Any, description: Any, artifact: ProjectionArtifact | None, lengths: tuple[int, ...]
) -> dict[str, Any]:
    limit = description.context_limit
    text = model.config.get_text_config()
    on_gpu = model.device.type == "cuda"
    return {
        "model": description.id,
        "layers": description.num_layers,
        "mlp": getattr(text, "intermediate_size", None),
        "vocabulary": description.vocab_size,
        "experts": decode.has_experts(model.config),
        "weight_bytes_read": decode.weight_bytes_read(model),
        "projections": "random" if artifact is None else artifact.metadata["algorithm"]["name"],
        "positions_beyond_limit": limit is not None and max(lengths) >= limit,
        "peak_memory": "allocated on the GPU" if on_gpu else "resident set of the process, libraries included",
        "graphs": on_gpu,
    }
