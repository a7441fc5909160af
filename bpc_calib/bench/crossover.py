"""Find the length from which a layer's sparse step is faster than a dense one on this machine."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bpc_calib.bench.dense import OURS
from bpc_calib.bench.inputs import LayerShape, make, working_sets
from bpc_calib.bench.layer import figures, right_forms
from bpc_calib.bench.settings import SHORTEST
from bpc_calib.bench.timing import timed
from bpc_calib.errors import BPCError
from bpc_calib.method.budget import attended
from bpc_calib.runtime.layers import own_from

__all__ = ["compared", "find_crossover"]

GRAIN = 256  # tokens; the result is a multiple
BISECTIONS = 2


def find_crossover(measure: Callable[[int], dict[str, Any]], longest: int) -> dict[str, Any]:
    """Double the length until sparse wins twice in a row, then bisect between the last loss and the first win.

    Args:
        measure: returns the row of `compared` for a length.
        longest: the largest length to measure, at least `SHORTEST`.

    Returns:
        `rows`, sorted by length, and `min_context`: the shortest measured length from which sparse always won; 0 if it
        won at every length, None if at no length.
    """
    rows: dict[int, dict[str, Any]] = {}
    length = SHORTEST
    while length <= longest:
        rows[length] = measure(length)
        if rows[length]["sparse_wins"] and length // 2 in rows and rows[length // 2]["sparse_wins"]:
            break
        length *= 2
    for _ in range(BISECTIONS):
        first_win = _won_from(rows)
        below = [length for length in rows if first_win is not None and length < first_win]
        if first_win is None or not below or first_win - max(below) <= GRAIN:
            break
        middle = (first_win + max(below)) // 2 // GRAIN * GRAIN
        if middle in rows:
            break
        rows[middle] = measure(middle)
    won = _won_from(rows)
    return {"rows": [rows[length] for length in sorted(rows)], "min_context": 0 if won == min(rows) else won}


def _won_from(rows: dict[int, dict[str, Any]]) -> int | None:
    """Return the shortest length from which sparse won at every measured length; None if it lost at the longest."""
    losses = [length for length, row in rows.items() if not row["sparse_wins"]]
    wins = [length for length in rows if length > max(losses, default=-1)]
    return min(wins, default=None)


def compared(
    shape: LayerShape, tokens: int, budget: float | int, rate: float, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Return the microseconds of a whole BPC step and of the fastest dense form at one length.

    Args:
        shape: the layer; its number of tokens does not count.
        tokens: cached tokens.
        budget: share of the tokens in (0, 1], or a number of tokens.
        rate: memory bandwidth for the floors, in bytes per second.
        repeats: timings of each form.
        device: where to measure.

    Raises:
        BPCError: BPC's step or every dense form cannot be timed.
    """
    shape = replace(shape, tokens=tokens)
    k = attended(tokens, budget)
    sets = working_sets(shape, k, device)
    inputs = make(shape, replace(sets, codes=min(sets.codes, sets.steps)), device)
    forms, notes = right_forms(inputs, device)
    # Below `min_context` a model on a CPU runs torch's attention, unless this package's is faster.
    owned = device.type == "cuda" or own_from(device, shape.dtype) < math.inf
    rivals = [name for name in forms if name.startswith("dense/") and (owned or OURS not in name)]
    counts = {"step": sets.steps} | dict.fromkeys(rivals, sets.dense)
    rows = inputs.rows(k)
    calls = {
        name: [functools.partial(forms[name], state, rows) for state in inputs.states[:count]]
        for name, count in counts.items()
    }
    timings = {name: figures(samples, None, rate) for name, samples in timed(calls, repeats, device).items()}
    ours = timings.pop("step")
    dense = {name: row for name, row in timings.items() if row["median"]}
    if not dense or not ours["median"]:
        what = "a step of BPC cannot be timed" if dense else "no dense form can be timed"
        notes |= {name: row["note"] for name, row in ({"step": ours} | timings).items() if "note" in row}
        raise BPCError(f"{what} ({'; '.join(f'{name}: {note}' for name, note in notes.items())})")
    best = min(dense, key=lambda name: dense[name]["median"])
    row = {"tokens": tokens, "attended": k, "cold": sets.cold, "sparse": ours, "dense": dense[best]}
    row |= {"form": best.partition("/")[2], "times_dense": round(dense[best]["median"] / ours["median"], 3)}
    return row | {"sparse_wins": ours["median"] < dense[best]["median"]}
