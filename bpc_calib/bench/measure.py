"""Run the benchmark: check the settings, measure every part, and return the result with all that explains it."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from bpc_artifacts import ProjectionArtifact
from bpc_calib.backends import dispatch
from bpc_calib.bench import decode, prefill
from bpc_calib.bench.crossover import compared, find_crossover
from bpc_calib.bench.inputs import LayerShape, working_sets
from bpc_calib.bench.layer import compile_seconds, layer_rows
from bpc_calib.bench.machine import machine
from bpc_calib.bench.random_models import random_artifact
from bpc_calib.bench.settings import (
    DECODE_LENGTHS,
    FEWEST,
    LENGTHS,
    PARTS,
    PREFILL_TOKENS,
    SHORTEST,
    Settings,
    check_settings,
)
from bpc_calib.bench.timing import bandwidth, reason
from bpc_calib.errors import BPCError
from bpc_calib.method.defaults import MIN_TOKENS
from bpc_calib.method.rules import default_dense_layers, ranking_defaults
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache

__all__ = ["Subject", "check", "run"]

PROMPT = 32768  # tokens, for hashing alone

Progress = Callable[[float, str], None]
Load = Callable[[], Any]
Keep = Callable[[dict[str, Any]], None]
Step = tuple[str, float, Callable[[Progress], None]]  # what is measured, about how long it takes, and the work


@dataclass(frozen=True)
class Subject:
    """The model that is measured."""

    config: Any
    load: Load
    dtype: torch.dtype
    device: torch.device
    artifact: ProjectionArtifact | None = None  # its projections; None: random ones
    whole_layers: int | None = None  # layers of the whole model, if the config has fewer


def check(settings: Settings, config: Any, artifact: ProjectionArtifact | None) -> None:
    """Raise a `BPCError` for settings that cannot be measured, before any work."""
    check_settings(settings)
    BPCCache(config, artifact or random_artifact(config), dense_layers=settings.dense_layers)


def run(
    settings: Settings,
    subject: Subject,
    progress: Progress = lambda share, what: None,
    keep: Keep = lambda result: None,
) -> dict[str, Any]:
    """Measure all parts of the settings, or the crossover.

    Args:
        subject: the model; it is loaded only if a part needs it.
        progress: called with the finished share and a description of the current work.
        keep: called with the partial result after every measurement, and with the final result.

    Returns:
        `device`, `backend`, `machine`, `settings`, `memory_bandwidth`, `compile_seconds` if notable, and one entry per
        part of the settings: `layer`, `decode`, `prefill`, or `crossover`. `left_out` lists `what` could not be
        measured, with the reason as `note`.

    Raises:
        BPCError: `check` failed, something does not fit in memory, or nothing could be measured.
    """
    config, dtype, device = subject.config, subject.dtype, subject.device
    artifact = subject.artifact or random_artifact(config)
    check(settings, config, artifact)
    began = time.monotonic()
    parts = ("crossover",) if settings.crossover else tuple(part for part in PARTS if part in settings.parts)
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
    decoded = [(batch, tokens) for batch in settings.batch_sizes for tokens in decode_lengths]
    for shape in shapes if {"layer", "crossover"} & set(parts) else ():
        working_sets(shape, shape.tokens, device)
    if "decode" in parts:
        weights = decode.total_bytes(config, dtype)
        for batch, tokens in decoded:
            decode.check_memory(config, weights, batch, tokens, dtype, device)
    resolved = asdict(settings) | {
        "lengths": lengths, "decode_lengths": decode_lengths, "prefill_tokens": prefill_tokens, "group_size": group,
        "kv_heads": base.kv_heads, "head_dim": base.dim, "dtype": str(dtype).removeprefix("torch."),
        "min_tokens": MIN_TOKENS,
    }  # fmt: skip
    if settings.dense_layers is None:
        resolved["dense_layers"] = default_dense_layers(artifact, description.num_layers)
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
    for part in parts:
        result[part] = {"rows": []} if part in ("decode", "prefill") else []
    work = _Run(settings, subject, artifact, base, rate, result)
    steps: list[Step] = []
    if "layer" in parts:
        steps += [
            (f"layer, {shape.tokens:,} tokens", 60_000 + shape.batch * shape.tokens, partial(work.layer, shape))
            for shape in shapes
        ]
    if "decode" in parts:
        steps += [
            (f"decode, {tokens:,} tokens", 60_000 + batch * tokens, partial(work.decode, batch, tokens))
            for batch, tokens in decoded
        ]
    if "prefill" in parts:
        steps.append((f"prefill, {prefill_tokens:,} tokens", 100_000, partial(work.prefill, prefill_tokens)))
    if "crossover" in parts:
        steps += [
            (
                f"crossover, batch {shape.batch}, group {group}, budget {budget}",
                1,
                partial(work.crossover, shape, budget),
            )
            for shape in shapes
            for budget in settings.budgets
        ]
    if not _measure(steps, result, progress, keep):
        raise BPCError("; ".join(f"{missing['what']}: {missing['note']}" for missing in result["left_out"]))
    progress(1.0, "done")
    result["seconds"] = round(time.monotonic() - began, 1)
    keep(result)
    return result


def _measure(steps: Sequence[Step], result: dict[str, Any], progress: Progress, keep: Keep) -> bool:
    """Do all steps, and note which ones failed; return whether anything was measured."""
    measured, done, total = False, 0.0, sum(weight for _, weight, _ in steps)
    for what, weight, add in steps:

        def report(share: float, what: str, done: float = done, weight: float = weight) -> None:
            progress((done + share * weight) / total, what)

        report(0.0, what)
        try:
            add(report)
            measured = True
        except Exception as error:
            result.setdefault("left_out", []).append({"what": what, "note": reason(error)})
        keep(result)
        done += weight
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return measured


@dataclass
class _Run:
    """The measurements of a run. Each adds its rows to `result`, and may report its progress."""

    settings: Settings
    subject: Subject
    artifact: ProjectionArtifact
    base: LayerShape
    rate: float  # memory bandwidth, in bytes per second
    result: dict[str, Any]

    def layer(self, shape: LayerShape, report: Progress) -> None:
        settings = self.settings
        device = self.subject.device
        self.result["layer"] += layer_rows(shape, settings.budgets, self.rate, settings.repeats, device)

    def decode(self, batch: int, tokens: int, report: Progress) -> None:
        rows, subject = self.rows_of_model("decode"), self.subject
        decode.check_memory(self.model.config, 0, batch, tokens, self.model.dtype, subject.device)
        layers = subject.whole_layers or describe(subject.config).num_layers
        rows += decode.decode_rows(self.model, self.artifact, batch, tokens, self.settings, layers, self.rate)

    def prefill(self, tokens: int, report: Progress) -> None:
        rows, repeats = self.rows_of_model("prefill"), math.ceil(self.settings.repeats / 3)
        rows.append(prefill.prefill_row(self.model, self.artifact, tokens, self.settings.dense_layers, repeats))
        for length in sorted({tokens, *(self.settings.lengths or (PROMPT,))}):
            rows.append(prefill.hashing_row(replace(self.base, tokens=length), repeats, self.subject.device))

    def crossover(self, shape: LayerShape, budget: float | int, report: Progress) -> None:
        def measure(tokens: int) -> dict[str, Any]:
            walked = math.log2(tokens / SHORTEST) / max(1.0, math.log2(shape.tokens / SHORTEST))
            report(0.9 * min(1.0, walked), f"crossover, {tokens:,} tokens")
            return compared(shape, tokens, budget, self.rate, self.settings.repeats, self.subject.device)

        about = {"batch": shape.batch, "group": shape.group, "budget": budget}
        self.result["crossover"].append(about | find_crossover(measure, shape.tokens))

    @functools.cached_property
    def model(self) -> Any:
        """The model, loaded when a part needs it."""
        return self.subject.load()

    def rows_of_model(self, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part that measures the model, after writing what is known about it beside them."""
        description, on_gpu = describe(self.subject.config), self.model.device.type == "cuda"
        limit = description.context_limit
        rows: list[dict[str, Any]] = self.result[part]["rows"]
        self.result[part] = {
            "model": description.id,
            "layers": description.num_layers,
            "whole_layers": self.subject.whole_layers or description.num_layers,
            "mlp": getattr(self.model.config.get_text_config(), "intermediate_size", None),
            "vocabulary": description.vocab_size,
            "experts": decode.has_experts(self.model.config),
            "weight_bytes_read": decode.weight_bytes_read(self.model),
            "projections": "random" if self.subject.artifact is None else self.artifact.metadata["algorithm"]["name"],
            "positions_beyond_limit": limit is not None and max(self.result["settings"]["decode_lengths"]) >= limit,
            "peak_memory": "allocated on the GPU" if on_gpu else "resident set of the process, libraries included",
            "graphs": on_gpu,
            "rows": rows,
        }
        return rows
