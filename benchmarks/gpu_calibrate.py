"""Time finding the projections of a layer on a GPU, from 65,536 keys per KV head."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_memory import free, lacking
from gpu_part import Emit, Limits, Step
from gpu_timing import clock, device, summary
from torch import Tensor

from bpc_calib import decompose
from bpc_calib.calibration.projection_method import PROJECTION_METHODS
from bpc_calib.method.fitting import fit, mean_key

__all__ = ["steps"]

KV_HEADS, DIM = 8, 128


def steps(limits: Limits) -> list[Step]:
    """One step per method; one that is not there fails alone."""
    tokens, repeats = (300, 1) if limits.tiny else (1 << 16, 3)
    whats = (
        "decompose, 8 steps per bit",
        "decompose, 1 step per bit (the paper's)",
        "fit as calibration does by default",
    )
    return [
        (what, functools.partial(_time, what, make, tokens, repeats))
        for what, make in zip(whats, (_eight, _one, _fit), strict=True)
    ]


def _eight(keys: Tensor) -> Callable[[], Any]:
    return functools.partial(decompose, keys, 64)


def _one(keys: Tensor) -> Callable[[], Any]:
    return functools.partial(decompose, keys, 64, iterations=1)


def _fit(keys: Tensor) -> Callable[[], Any]:
    root = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=torch.Generator(device()).manual_seed(1), device=device())
    method = next(each for each in PROJECTION_METHODS.values() if each.metric)
    return functools.partial(
        fit, keys, 64, iterations=method.iterations, rounds=method.rounds, metric=root.mT @ root / (2 * DIM),
        mean=mean_key(keys) if method.centred else None,
    )  # fmt: skip


def _time(what: str, make: Callable[[Tensor], Callable[[], Any]], tokens: int, repeats: int, emit: Emit) -> None:
    about = f"{what}: {KV_HEADS} KV heads, {tokens:,} keys, D={DIM}, 64 bits"
    # Some copies of the keys and of the residuals in float64.
    if why := lacking(KV_HEADS * tokens * DIM * 8 * 8, free(device())):
        emit({"what": about, "unit": "s", "median": None, "note": why})
        return
    keys = torch.randn(KV_HEADS, tokens, DIM, generator=torch.Generator(device()).manual_seed(0), device=device())
    run = make((keys * torch.logspace(0, -1, DIM, device=device())).bfloat16())
    run()
    samples = [clock(run) for _ in range(repeats)]
    emit({"what": about, "unit": "s", **summary(samples, 4)})
    emit({"what": f"{what}: 32 such layers", "unit": "s", "median": round(32 * statistics.median(samples), 2)})
