"""From how many tokens on a sparse step of a layer is faster than a dense one, on this machine."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bpc_calib.bench.inputs import LayerShape, make, working_sets
from bpc_calib.bench.layer import figures, right_forms, set_of
from bpc_calib.bench.timing import timed
from bpc_calib.errors import BPCError, InputError
from bpc_calib.method.selection import attended

__all__ = ["compared", "find_crossover"]

SHORTEST = 256  # below, the least tokens attended are most of all
GRAIN = 256  # tokens; the result is a multiple


def find_crossover(
    measure: Callable[[int], dict[str, Any]], longest: int, *, shortest: int = SHORTEST, refinements: int = 2
) -> dict[str, Any]:
    """Walk lengths by doubling until sparse wins twice in a row, then look between the last loss and the first win.

    Args:
        measure: of a length the row of `compared`.
        longest: where to stop.

    Returns:
        `rows` by length, and `min_context`: the shortest length measured from which on sparse won at each, 0 if it
        won at all of them, None at none.
    """
    if longest < shortest:
        raise InputError(f"the longest of --lengths is {longest:,}, and the walk begins at {shortest:,}")
    rows: dict[int, dict[str, Any]] = {}
    length = shortest
    while length <= longest:
        rows[length] = measure(length)
        if rows[length]["sparse_wins"] and length // 2 in rows and rows[length // 2]["sparse_wins"]:
            break
        length *= 2
    for _ in range(refinements):
        found = _won_from(rows)
        below = [each for each in rows if found is not None and each < found]
        if found is None or not below or found - max(below) <= GRAIN:
            break
        middle = (found + max(below)) // 2 // GRAIN * GRAIN
        if middle in rows:
            break
        rows[middle] = measure(middle)
    won = _won_from(rows)
    return {"rows": [rows[each] for each in sorted(rows)], "min_context": 0 if won == min(rows) else won}


def _won_from(rows: dict[int, dict[str, Any]]) -> int | None:
    """The shortest length from which on sparse won at each."""
    losses = [length for length, row in rows.items() if not row["sparse_wins"]]
    wins = [length for length in rows if length > max(losses, default=-1)]
    return min(wins, default=None)


def compared(
    shape: LayerShape, tokens: int, budget: float | int, rate: float, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Microseconds of a whole step of ours and of the fastest dense form at one length.

    Raises:
        BPCError: there is no form of either to compare.
    """
    shape = replace(shape, tokens=tokens)
    k = attended(tokens, budget)
    sets = working_sets(shape, k, device)
    inputs = make(shape, replace(sets, codes=min(sets.codes, sets.steps)), device)
    forms, notes = right_forms(inputs, device, papers=False)
    calls = {
        name: [
            functools.partial(form, *set_of(inputs, i), k) for i in range(sets.steps if name == "step" else sets.dense)
        ]
        for name, form in forms.items()
    }
    taken = timed(calls, repeats, device)
    notes |= {name: samples for name, samples in taken.items() if isinstance(samples, str)}
    found = {name: figures(samples, None, rate) for name, samples in taken.items()}
    dense = {name: row for name, row in found.items() if name != "step" and row["median"]}
    if not dense or not found["step"]["median"]:
        what = "a step of BPC cannot be timed" if dense else "no dense form can be compared"
        raise BPCError(f"{what} ({'; '.join(f'{name}: {note}' for name, note in notes.items())})")
    best = min(dense, key=lambda name: dense[name]["median"])
    row = {"tokens": tokens, "attended": k, "cold": sets.cold, "sparse": found["step"], "dense": dense[best]}
    row |= {"form": best.partition("/")[2], "times_dense": round(dense[best]["median"] / found["step"]["median"], 3)}
    return row | {"sparse_wins": found["step"]["median"] < dense[best]["median"]}
