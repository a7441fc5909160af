"""Time a decoding step of one attention layer by stage, with its byte floors, dense attention and the paper's step."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.bench import dense, paper
from bpc_calib.bench.inputs import (
    ONE,
    LayerInputs,
    LayerShape,
    Sets,
    code_bytes,
    dense_bytes,
    least_microseconds,
    make,
    stage_bytes,
    working_sets,
)
from bpc_calib.bench.timing import reason, summary, synchronize, timed
from bpc_calib.errors import BPCError
from bpc_calib.method.budget import attended
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import Encoder

__all__ = ["compile_seconds", "figures", "layer_rows", "right_forms", "set_of"]

STAGES = ("encode", "project", "score", "select", "attend", "step")
NOTABLE = 0.5  # seconds; shorter compilation is not reported

Form = Callable[..., Tensor]
Calls = dict[str, list[Callable[[], Any]]]


def compile_seconds(shape: LayerShape, device: torch.device) -> float | None:
    """Return by how many seconds the first step is slower than the second (compilation, loading); None if under 0.5."""
    inputs = make(shape, ONE, device)
    k = attended(shape.tokens, 0.5, 1)

    def run() -> float:
        began = time.perf_counter()
        step(inputs.encoder, inputs.new, inputs.query, inputs.projection, k, *set_of(inputs, 0))
        synchronize(device)
        return time.perf_counter() - began

    first, second = run(), run()
    return round(first - second, 2) if first - second > NOTABLE else None


def layer_rows(
    shape: LayerShape, budgets: Sequence[float | int], rate: float, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return rows of microseconds for one shape: BPC by stage and the paper's step per budget, and every dense form.

    Args:
        rate: memory bandwidth for the floors, in bytes per second.

    Returns:
        Rows with `method`, `stage`, `form`, `budget`, `attended`, `median`, `spread`, `floor`, `floor_share` (floor /
        median), `best` (whether this form is the fastest), and `cold` (whether each working set had left the caches
        when it was read again). A row without a measurement has a `note` that says why. Rows of BPC's whole step have
        the speedups `times_dense` and `times_paper`: the time of the other method divided by BPC's.
    """
    ks = {budget: attended(shape.tokens, budget) for budget in budgets}
    sets = working_sets(shape, min(ks.values()), device)
    inputs = make(shape, sets, device)
    forms, notes = right_forms(inputs, device)
    calls: Calls = {}
    for name, form in forms.items():
        if name.startswith("dense/"):
            calls[name] = [functools.partial(form, *set_of(inputs, i)) for i in range(sets.dense)]
            continue
        for budget, k in ks.items():
            calls[f"{budget}/{name}"] = [functools.partial(form, *set_of(inputs, i), k) for i in range(sets.steps)]
    calls["encode"] = [functools.partial(dispatch.encode_with, inputs.encoder, inputs.new)] * sets.steps
    for budget, k in ks.items():
        calls |= _stage_calls(f"{budget}/", inputs, k, sets, device)
    return _rows(shape, ks, timed(calls, repeats, device), notes, rate, sets)


def right_forms(
    inputs: LayerInputs, device: torch.device, *, papers: bool = True
) -> tuple[dict[str, Form], dict[str, str]]:
    """Return the correct whole steps, functions of codes, gains, keys, values and `k`; and why others are left out.

    A step is correct if, with all tokens attended, its result is close to dense attention in float64.

    Raises:
        BPCError: BPC's own step is not correct, so no timing would mean anything.
    """

    def ours(codes: Tensor, gains: Tensor, keys: Tensor, values: Tensor, k: int) -> Tensor:
        return step(inputs.encoder, inputs.new, inputs.query, inputs.projection, k, codes, gains, keys, values)

    def the_papers(function: Any, codes: Tensor, gains: Tensor, keys: Tensor, values: Tensor, k: int) -> Tensor:
        dispatch.encode_with(inputs.plain, inputs.new)
        return function(inputs.query, inputs.projection, codes, keys, values, k)

    def attention(function: Any, codes: Tensor, gains: Tensor, keys: Tensor, values: Tensor, k: int = 0) -> Tensor:
        return function(inputs.query, keys, values)

    forms: dict[str, Form] = {"step": ours}
    notes: dict[str, str] = {}
    for name, each in paper.forms(device).items() if papers else ():
        forms[f"paper/{name}"] = functools.partial(the_papers, each)
    for name, form in dense.forms(device).items():
        if isinstance(form, str):
            notes[f"dense/{name}"] = form
        else:
            forms[f"dense/{name}"] = functools.partial(attention, form)
    first_set = set_of(inputs, 0)
    expected = dense.exact(inputs.query, *first_set[2:])
    for name in list(forms):
        try:
            off = dense.error(forms[name](*first_set, first_set[0].shape[2]), expected)
            fault = "" if off < dense.TOLERANCE else f"not measured: its result is off by {off:.1e}"
        except Exception as error:
            fault = reason(error)
        if fault and name == "step":
            raise BPCError(f"with all tokens, BPC's step differs from dense attention ({fault}): nothing was timed")
        if fault:
            notes[name] = fault
            del forms[name]
    return forms, notes


def set_of(inputs: LayerInputs, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, gains, keys and values of the working set for call number `i`."""
    code, key = i % len(inputs.codes), i % len(inputs.keys)
    return inputs.codes[code], inputs.gains[code], inputs.keys[key], inputs.values[key]


def _stage_calls(prefix: str, inputs: LayerInputs, k: int, sets: Sets, device: torch.device) -> Calls:
    calls: Calls = {}
    stages = dispatch.find(device).stages(inputs.query, inputs.projection, k, _choice(inputs.query))
    for stage, function in stages.items():
        calls[f"{prefix}up to {stage}"] = [
            functools.partial(function, *set_of(inputs, i)[:2]) for i in range(sets.codes)
        ]
    lists = [_choose(inputs.query, inputs.projection, *set_of(inputs, i)[:2], k) for i in range(sets.keys)]
    calls[f"{prefix}attend"] = [
        functools.partial(dispatch.sparse_attention, inputs.query, inputs.keys[i], inputs.values[i], lists[i])
        for i in range(sets.keys)
    ]
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
    dense_size = dense_bytes(shape.rows, shape.tokens, shape.dim, shape.dtype.itemsize)
    dense_forms = {
        name: taken.get(name, notes.get(name, "")) for name in {**taken, **notes} if name.startswith("dense/")
    }
    rows = [about | {"method": "dense", **row} for row in _forms(dense_forms, dense_size, rate)]
    for budget, k in ks.items():
        facts = about | {"budget": budget, "attended": k}
        sizes = stage_bytes(shape.rows, shape.tokens, k, shape.dim, shape.dtype.itemsize)
        for stage, samples in _stages(taken, f"{budget}/").items():
            rows.append(facts | {"method": "BPC", "stage": stage} | figures(samples, sizes.get(stage), rate))
        paper_size = code_bytes(shape.rows, shape.tokens, gain=False) + sizes["attend"]
        prefix = f"{budget}/paper/"
        papers = {name.partition("/")[2]: samples for name, samples in taken.items() if name.startswith(prefix)}
        papers |= {name: note for name, note in notes.items() if name.startswith("paper/")}
        rows += [facts | {"method": "paper", **row} for row in _forms(papers, paper_size, rate)]
    for row in rows:
        if row["method"] == "BPC" and row["stage"] == "step" and row["median"]:
            row |= _ratios(row, rows)
    return rows


def _stages(taken: dict[str, list[float] | str], prefix: str) -> dict[str, list[float] | str]:
    """Return the samples of each stage; a stage that cannot run alone is the difference between two runs per round."""
    before, scored, chosen = (taken[f"{prefix}up to {name}"] for name in ("project", "score", "select"))
    samples = {
        "encode": taken["encode"], "project": before, "score": _less(scored, before), "select": _less(chosen, scored),
        "attend": taken[f"{prefix}attend"], "step": taken[f"{prefix}step"],
    }  # fmt: skip
    return {stage: samples[stage] for stage in STAGES}


def _less(samples: list[float] | str, before: list[float] | str) -> list[float] | str:
    """Return the differences of two lists of samples; a note instead of samples stays a note."""
    if isinstance(samples, str) or isinstance(before, str):
        return samples if isinstance(samples, str) else before
    return [a - b for a, b in zip(samples, before, strict=True)]


def _forms(found: dict[str, Any], size: int, rate: float) -> list[dict[str, Any]]:
    """Return one row per form of a whole step, with the fastest marked as `best`."""
    rows: list[dict[str, Any]] = []
    for name, samples in found.items():
        form = name.partition("/")[2]
        rows.append({"stage": "step", "form": form, "best": False} | figures(samples, size, rate))
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


def _ratios(ours: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the speedups of BPC's step over the fastest dense form and the fastest form of the paper's step."""
    ratios: dict[str, float | None] = {}
    for method in ("dense", "paper"):
        best = [
            row["median"]
            for row in rows
            if row["method"] == method and row["best"] and row.get("budget", ours["budget"]) == ours["budget"]
        ]
        ratios[f"times_{method}"] = round(best[0] / ours["median"], 3) if best else None
    return ratios


def _choice(query: Tensor) -> Choice:
    """Return the default `Choice` of a cache, for queries `[B, H_KV, G, D]`."""
    return Choice(scaling=query.shape[-1] ** -0.5)


def _choose(query: Tensor, projection: Tensor, codes: Tensor, gain: Tensor | None, k: int) -> Tensor:
    """Choose the attended tokens as a cache does."""
    return dispatch.choose(query, projection, Cached(codes, gain), k, _choice(query))


def step(
    encoder: Encoder,
    new: Tensor,
    query: Tensor,
    projection: Tensor,
    k: int,
    codes: Tensor,
    gain: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Run a whole step as a cache does: encode the new key, choose tokens, compute attention over them.

    Args:
        encoder: made from the projection.
        new: the new key, `[B, H_KV, 1, D]`.
        query: `[B, H_KV, G, D]`.
        projection: `[H_KV, H, D]`.
        k: number of tokens.
        codes: int64 `[B, H_KV, N, W]`.
        gain: uint8 `[B, H_KV, N]`.
        keys, values: `[B, H_KV, N, D]`.

    Returns:
        `[B, H_KV, G, D]`.
    """
    dispatch.encode_with(encoder, new)
    return dispatch.sparse_attention(query, keys, values, _choose(query, projection, codes, gain, k))
