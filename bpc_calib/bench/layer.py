"""Time a decoding step of one attention layer by stage, with its byte floors, and dense attention."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.bench import dense
from bpc_calib.bench.inputs import (
    ONE,
    LayerInputs,
    LayerShape,
    Sets,
    dense_bytes,
    least_microseconds,
    make,
    stage_bytes,
    working_sets,
)
from bpc_calib.bench.stages import stages_of
from bpc_calib.bench.timing import summary, synchronize, timed
from bpc_calib.errors import BPCError
from bpc_calib.method.budget import attended
from bpc_calib.method.state import Rows, State

__all__ = ["compile_seconds", "figures", "layer_rows", "right_forms"]

NOTABLE = 0.5  # seconds; shorter compilation is not reported

Form = Callable[..., Tensor]
Calls = dict[str, list[Callable[[], Any]]]


def compile_seconds(shape: LayerShape, device: torch.device) -> float | None:
    """Return by how many seconds the first step is slower than the second (compilation, loading); None if under 0.5."""
    inputs = make(shape, ONE, device)
    rows = inputs.rows(attended(shape.tokens, 0.5, 1))

    def run() -> float:
        began = time.perf_counter()
        step(inputs, inputs.states[0], rows)
        synchronize(device)
        return time.perf_counter() - began

    first, second = run(), run()
    return round(first - second, 2) if first - second > NOTABLE else None


def layer_rows(
    shape: LayerShape, budgets: Sequence[float | int], rate: float, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return rows of microseconds for one shape: BPC by stage per budget, and every dense form.

    Args:
        rate: memory bandwidth for the floors, in bytes per second.

    Returns:
        Rows with `method`, `stage`, `form`, `budget`, `attended`, `median`, `spread`, `floor`, `floor_share` (floor /
        median), `best` (whether this form is the fastest), and `cold` (whether each working set had left the caches
        when it was read again). A row without a measurement has a `note` that says why. Rows of BPC's whole step have
        the speedup `times_dense`: the time of the fastest dense form divided by BPC's.
    """
    ks = {budget: attended(shape.tokens, budget) for budget in budgets}
    sets = working_sets(shape, min(ks.values()), device)
    inputs = make(shape, sets, device)
    forms, notes = right_forms(inputs, device)
    ours = forms.pop("step")
    calls: Calls = {
        name: [functools.partial(form, state) for state in inputs.states[: sets.dense]] for name, form in forms.items()
    }
    new = inputs.states[0].keys[:, :, -1:]
    calls["encode"] = [functools.partial(dispatch.find(new).encode_with, inputs.codebook, new)] * sets.steps
    for budget, k in ks.items():
        rows = inputs.rows(k)
        calls[f"{budget}/step"] = [functools.partial(ours, state, rows) for state in inputs.states[: sets.steps]]
        calls |= _stage_calls(f"{budget}/", inputs, rows, sets)
    return _rows(shape, ks, timed(calls, repeats, device), notes, rate, sets)


def right_forms(inputs: LayerInputs, device: torch.device) -> tuple[dict[str, Form], dict[str, str]]:
    """Return the correct whole steps, functions of a state and, of BPC's, its rows; and why others are left out.

    A step is correct if, with all tokens attended, its result is close to dense attention in float64.

    Raises:
        BPCError: BPC's own step is not correct, so no timing would mean anything.
    """

    def attention(function: dense.Dense, state: State, rows: Rows | None = None) -> Tensor:
        return function(inputs.query, state.keys, state.values)

    ours, first = functools.partial(step, inputs), inputs.states[0]
    expected = dense.exact(inputs.query, first.keys, first.values)
    fault = dense.fault(functools.partial(ours, first, inputs.rows(first.room)), expected)
    if fault:
        raise BPCError(f"with all tokens, BPC's step differs from dense attention ({fault}): nothing was timed")
    correct, faults = dense.correct_forms(inputs.query, first.keys, first.values, expected)
    forms: dict[str, Form] = {"step": ours}
    forms |= {f"dense/{name}": functools.partial(attention, form) for name, form in correct.items()}
    return forms, {f"dense/{name}": why for name, why in faults.items()}


def _stage_calls(prefix: str, inputs: LayerInputs, rows: Rows, sets: Sets) -> Calls:
    stages, attend = stages_of(inputs.query, inputs.codebook, rows, inputs.rules)
    calls: Calls = {
        f"{prefix}up to {name}": [functools.partial(stage, state) for state in inputs.states[: sets.codes]]
        for name, stage in stages.items()
    }
    chosen = [(state, stages["select"](state)) for state in inputs.states[: sets.keys]]
    calls[f"{prefix}attend"] = [functools.partial(attend, state, indices) for state, indices in chosen]
    return calls


def _rows(
    shape: LayerShape,
    ks: dict[float | int, int],
    taken: dict[str, list[float] | str],
    notes: dict[str, str],
    rate: float,
    sets: Sets,
) -> list[dict[str, Any]]:
    about = {
        "batch": shape.batch,
        "group": shape.group,
        "tokens": shape.tokens,
        "working_sets": sets.steps,
        "cold": sets.cold,
    }
    dense_size = dense_bytes(shape, shape.tokens)
    rows = [about | row for row in _dense_rows({**taken, **notes}, dense_size, rate)]
    fastest = next((row["median"] for row in rows if row["best"]), None)
    for budget, k in ks.items():
        facts = about | {"budget": budget, "attended": k}
        sizes = stage_bytes(shape, k)
        for stage, samples in _stages(taken, f"{budget}/").items():
            row = facts | {"method": "BPC", "stage": stage} | figures(samples, sizes.get(stage), rate)
            if stage == "step" and row["median"]:
                row["times_dense"] = round(fastest / row["median"], 3) if fastest else None
            rows.append(row)
    return rows


def _stages(taken: dict[str, list[float] | str], prefix: str) -> dict[str, list[float] | str]:
    """Return the samples of each stage; a stage that cannot run alone is the difference between two runs per round."""
    before, scored, chosen = (taken[f"{prefix}up to {name}"] for name in ("project", "score", "select"))
    return {
        "encode": taken["encode"], "project": before, "score": _less(scored, before), "select": _less(chosen, scored),
        "attend": taken[f"{prefix}attend"], "step": taken[f"{prefix}step"],
    }  # fmt: skip


def _less(samples: list[float] | str, before: list[float] | str) -> list[float] | str:
    """Return the differences of two lists of samples; a note instead of samples stays a note."""
    if isinstance(samples, str) or isinstance(before, str):
        return samples if isinstance(samples, str) else before
    return [a - b for a, b in zip(samples, before, strict=True)]


def _dense_rows(found: dict[str, list[float] | str], size: int, rate: float) -> list[dict[str, Any]]:
    """Return one row per dense form among samples and notes by name, with the fastest marked as `best`."""
    rows: list[dict[str, Any]] = []
    for name, samples in found.items():
        if name.startswith("dense/"):
            about = {"method": "dense", "stage": "step", "form": name.removeprefix("dense/"), "best": False}
            rows.append(about | figures(samples, size, rate))
    measured = [row for row in rows if row["median"]]
    if measured:
        min(measured, key=lambda row: row["median"])["best"] = True
    return rows


def figures(samples: list[float] | str, size: int | None, rate: float) -> dict[str, Any]:
    """Return median and spread in microseconds with the floor of `size` bytes; or a note that says why not."""
    if isinstance(samples, str):
        return {"median": None, "spread": None, "note": samples}
    row = summary(samples)
    if size is not None:
        floor = least_microseconds(size, rate)
        row |= {"floor": round(floor, 2), "floor_share": round(floor / row["median"], 4) if row["median"] > 0 else None}
    return row


def step(inputs: LayerInputs, state: State, rows: Rows) -> Tensor:
    """Run a whole step on a working set as a cache does: hash the newest key, choose `k` tokens, attend to them."""
    query, serving = inputs.query, dispatch.find(inputs.query, state)
    return serving.sparse_decode(query, inputs.codebook, state, rows, inputs.rules, fresh=1)[0]
