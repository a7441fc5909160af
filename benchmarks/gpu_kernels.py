"""Times of a layer's decoding step on a GPU, by stage, beside the floor, dense attention and the paper's pipeline."""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_layer import DIM, FORMS, KV_HEADS, Layer
from gpu_memory import free, lacking, working_sets
from gpu_part import Emit, Limits, Step
from gpu_timing import bandwidth_row, device, summary, timed

from bpc_calib.bench import dense
from bpc_calib.bench.machine import cache_bytes

__all__ = ["cases", "steps"]

LENGTHS = (1 << 17, 1 << 19, (1 << 17) - 77, 1 << 15, 1 << 13, 100_003)
FEW = (163,)
CODE, KEYS = KV_HEADS * 9, KV_HEADS * DIM * 4  # bytes of a token: code and gain, keys and values


def steps(limits: Limits) -> list[Step]:
    """One step per length: BPC by stage, the paper's pipeline, and every form of dense attention."""
    made: list[Step] = [("bandwidth", lambda emit: emit(bandwidth_row(tiny=limits.tiny)[1]))]
    for tokens in FEW if limits.tiny else LENGTHS:
        made.append((f"a step at {tokens:,} tokens", functools.partial(_length, tokens, limits.tiny)))
    return made


def cases(*, tiny: bool) -> list[tuple[str, Callable[[], Any]]]:
    """The same kernels, to be compiled: two working sets, because the second one may be aligned differently."""
    return [
        (f"{family} at {tokens:,} tokens", functools.partial(_compile, tokens, family))
        for tokens in (FEW if tiny else LENGTHS)
        for family in [*(name for name, _, _ in FORMS), "paper", "dense attention"]
    ]


def _compile(tokens: int, family: str) -> str | None:
    if why := lacking(3 * tokens * (KEYS + 2 * CODE), free(device())):
        return why
    layer = Layer(tokens, 2, 2)
    calls = [layer.bpc(*form) for form in FORMS if form[0] == family]
    if family == "paper":
        calls = [layer.paper()]
    elif family == "dense attention":
        attend = dense.ours(device())
        calls = [{family: [functools.partial(attend, layer.query, layer.keys[i], layer.values[i]) for i in range(2)]}]
    for forms in calls:
        for runs in forms.values():
            for run in runs:
                run()
    return None


def _length(tokens: int, tiny: bool, emit: Emit) -> None:
    rate, _ = bandwidth_row(tiny=tiny)
    if torch.cuda.is_available():
        sets = working_sets(tokens, CODE, KEYS, 4 * cache_bytes(device()), free(device()))
    else:
        sets = 1, 1
    about = {"tokens": tokens, "what": "working sets used in turn, so that none stays in L2", "median": sets}
    if not sets[0]:
        emit(about | {"note": lacking(5 * tokens * KEYS, free(device()))})
        return
    emit(about)
    for row in _step(Layer(tokens, *sets), rate, 1 if tiny else 11):
        emit({"tokens": tokens, **row})


def _step(layer: Layer, rate: float, repeats: int) -> Iterator[dict[str, Any]]:
    notes: dict[str, str] = {}
    forms = layer.bpc(*FORMS[0]) | layer.bpc(*FORMS[1]) | layer.paper() | layer.dense(notes)
    replayed = timed(forms, repeats, graphs=True)
    eager = timed({name: calls[:32] for name, calls in forms.items()}, -(-repeats // 2), graphs=False)
    for name, _, _ in FORMS:  # some stages cannot run alone: their times are differences
        for kind in (replayed, eager):
            before, scored, chosen = (kind.pop(f"{name}: {stage}") for stage in ("project", "score", "select"))
            kind |= {f"{name}: project": before, f"{name}: score": _less(scored, before)}
            kind |= {f"{name}: select": _less(chosen, scored)}
    yield from _rows(replayed, eager, layer.floors, notes, rate)
    yield from _ratios(replayed)


def _less(samples: list[float] | str, before: list[float] | str) -> list[float] | str:
    if isinstance(samples, str) or isinstance(before, str):
        return samples if isinstance(samples, str) else before
    return [a - b for a, b in zip(samples, before, strict=True)]


def _rows(
    replayed: dict[str, Any], eager: dict[str, Any], floors: dict[str, int], notes: dict[str, str], rate: float
) -> Iterator[dict[str, Any]]:
    """One row per form; the stages of BPC in the order in which they run."""
    order = ("project", "score", "select", "attend", "whole")
    names = [f"{name}: {stage}" for name, _, _ in FORMS for stage in order]
    for name in [*names, *(each for each in floors if each not in names)]:
        floor = 1e6 * floors[name] / rate if name in floors else None
        row: dict[str, Any] = {"what": name, "unit": "us"}
        samples = replayed.get(name, notes.get(name))
        if isinstance(samples, list):
            row |= summary(samples)
            alone = eager[name]
            row["eager"] = summary(alone)["median"] if isinstance(alone, list) else alone
        else:
            row |= {"median": None, "spread": None, "note": samples}
        if floor is not None:
            row["floor"] = round(floor, 2)
            row["times_floor"] = round(row["median"] / floor, 2) if row["median"] else None
        yield row


def _ratios(replayed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The speedup of a whole step of BPC over the others."""
    medians = {name: statistics.median(s) for name, s in replayed.items() if isinstance(s, list)}
    bests = []
    for kind in ("paper, ", "dense: "):
        own = [name for name in medians if name.startswith(kind)]
        bests += [min(own, key=lambda name: medians[name])] if own else []
    for name, _, _ in FORMS:
        ours = f"{name}: whole"
        for best in bests if ours in medians else ():
            ratio = medians[best] / medians[ours]
            yield {"what": f"best {best} / {ours}", "unit": "times", "median": round(ratio, 2)}
