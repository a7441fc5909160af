"""What a calibration will take on this machine: parts of it run on random numbers, and counting."""

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bpc_calib.calibration.keys import chunk_edges, pass_bytes, sample_keys
from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.positions import key_positions
from bpc_calib.calibration.projecting import fit_layers, layers_at_once
from bpc_calib.errors import first_line
from bpc_calib.models.description import ModelDescription

__all__ = ["Forecast", "Needs", "forecast", "needs"]

log = logging.getLogger(__name__)

VOCABULARY = 1024  # of the model with few layers
KEYS = 16_384  # most keys per head of the trial fit: its time grows with their number
LAYERS = 3  # of one kind, at most: masks and the like are made once for all of them
SHORT = 256  # tokens or keys of a first run, which loads and compiles
REPEATS, LONG = 3, 5.0  # runs of each part, while all of them take less than so many seconds
COPIES = 3  # of the keys of a group of layers: as read, stacked, and as the kernels want them


@dataclass(frozen=True)
class Needs:
    """What can be counted without running anything: bytes are peaks of one device each."""

    pass_bytes: int  # of a sample's forward passes, without the weights
    fit_bytes: int  # of the keys that are fitted together
    disk_bytes: int  # of the work folder


@dataclass(frozen=True)
class Forecast(Needs):
    """The same with times, which are without loading libraries, weights and text."""

    collect_seconds: float | None  # None: few layers of this model do not run alone
    decompose_seconds: float


def needs(plan: Plan, model: Any, device: torch.device) -> Needs:
    """Count what a calibration takes beside the weights; the arguments are those of `forecast`."""
    itemsize = model.dtype.itemsize
    passes = chunk_edges(model, plan.model, plan.sequence_length)
    whole, chunked = pass_bytes(model.config.get_text_config(decoder=True), plan.model, plan.sequence_length, itemsize)
    fitted = plan.model.kv_heads * plan.keys_per_head * plan.model.head_dim * itemsize
    return Needs(
        whole if len(passes) == 1 else chunked,
        COPIES * layers_at_once(plan, itemsize, device) * fitted,
        plan.work_bytes(itemsize),
    )


def forecast(plan: Plan, model: Any, device: torch.device) -> Forecast:
    """Run one sample through few random layers of each kind, fit some keys of one group of layers, and multiply.

    Args:
        plan: the calibration.
        model: a transformers model without memory for its weights (on the device "meta").
        device: that will run the model.
    """
    group = layers_at_once(plan, model.dtype.itemsize, device)
    passes = chunk_edges(model, plan.model, plan.sequence_length)
    try:
        collect_seconds = plan.samples * _sample_seconds(plan, model, device, passes)
    except Exception as fault:  # transformers' models are many, and some need all of their layers
        log.info("no forecast of the time per sample: %s", first_line(fault))
        collect_seconds = None
    fit_seconds = _fit_seconds(plan, group, model.dtype, device)
    return Forecast(**vars(needs(plan, model, device)), collect_seconds=collect_seconds, decompose_seconds=fit_seconds)


def _sample_seconds(plan: Plan, model: Any, device: torch.device, passes: list[tuple[int, int]]) -> float:
    """The time of one sample, kind by kind: that of one layer, and of every other one what some more layers add."""
    positions, total = key_positions(plan)[0], 0.0
    tokens = torch.arange(plan.sequence_length) % VOCABULARY
    for kind, count in Counter(plan.model.layer_types).items():
        times = []
        for layers in sorted({1, min(count, LAYERS)}):
            few = replace(plan.model, num_layers=layers, layer_types=[kind] * layers)
            trial = _few_layers(model, few).to(device)
            sample_keys(trial, few, tokens[:SHORT], [0])
            run = partial(sample_keys, trial, few, tokens, positions, moments=bool(plan.summed), passes=passes)
            times.append(_seconds(run, device))
        first, more = times[0], times[-1] - times[0]
        total += first + (count - 1) * max(more, 0.0) / (min(count, LAYERS) - 1 or 1)
    return total


def _few_layers(model: Any, few: ModelDescription) -> Any:
    """A model with few random layers and few tokens."""
    from transformers import AutoModelForCausalLM

    text = copy.deepcopy(model.config.get_text_config(decoder=True))
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = few.num_layers, VOCABULARY, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = few.layer_types
    if hasattr(text, "quantization_config"):
        del text.quantization_config
    return AutoModelForCausalLM.from_config(text, dtype=model.dtype).eval()


def _fit_seconds(plan: Plan, group: int, dtype: torch.dtype, device: torch.device) -> float:
    """The time to fit all layers, from that of `group` layers with fewer keys."""
    model = plan.model
    count = min(plan.keys_per_head, KEYS)
    shape = (group, model.kv_heads, count, model.head_dim)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(shape, generator=generator).to(dtype)
    aside = keys[:, :, : 1 + count * plan.held_out_keys_per_head // plan.keys_per_head] if plan.held_out else None
    moments = torch.eye(model.head_dim, dtype=torch.float64).expand(*shape[:2], -1, -1) if plan.summed else None
    fit_layers(keys[:, :, :SHORT], aside, moments, plan, device)
    seconds = _seconds(partial(fit_layers, keys, aside, moments, plan, device), device)
    return seconds * plan.keys_per_head / count * -(-len(model.full_layers) // group)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The time of a call, the device's work included: the shortest of some, as other programs only slow it down."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < LONG:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
