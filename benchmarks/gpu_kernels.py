"""Times of a layer's decoding step on a GPU, by stage, beside the floor, dense attention and the paper's pipeline."""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_exactness import random_codes
from gpu_timing import bandwidth, device, reason, summary, timed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bpc_calib.backends import dispatch
from bpc_calib.backends.triton import paper, pipeline
from bpc_calib.bench import dense
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.selection import attended

__all__ = ["DIM", "GROUP", "KV_HEADS", "bandwidth_row", "steps"]

KV_HEADS, GROUP, DIM, BUDGET = 8, 4, 128, 0.02
FORMS = (("relative, gain", "relative", True), ("max, no gain", "max", False))

Emit = Callable[[dict[str, Any]], None]


def bandwidth_row(*, tiny: bool) -> tuple[float, dict[str, Any]]:
    """Bytes per second of a copy within the memory, and the row that reports it."""
    megabytes = 4 if tiny else 4096
    rates = [each / 1e9 for each in bandwidth(megabytes)]
    row = {"what": f"copy of {megabytes:,} MiB, GB/s, bytes read and written", **summary(rates)}
    return 1e9 * statistics.median(rates), row


def steps(emit: Emit, *, tiny: bool) -> None:
    """A step at every length: BPC by stage, the paper's pipeline, and every form of dense attention."""
    rate, row = bandwidth_row(tiny=tiny)
    emit(row)
    for tokens in (200,) if tiny else (1 << 17, 1 << 19, 1 << 15, 1 << 13):
        for row in _step(tokens, rate, 1 if tiny else 11):
            emit({"tokens": tokens, **row})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _step(tokens: int, rate: float, repeats: int) -> Iterator[dict[str, Any]]:
    k, where = attended(tokens, BUDGET), device()
    sets, dense_sets = _sets(tokens)
    yield {"what": "working sets used in turn, so that none stays in L2", "median": sets}
    generator = torch.Generator(where).manual_seed(0)
    query = torch.randn(1, KV_HEADS, GROUP, DIM, generator=generator, device=where).bfloat16()
    projection = torch.randn(KV_HEADS, 64, DIM, generator=generator, device=where)
    shape = (sets, 1, KV_HEADS, tokens)
    codes = random_codes(*shape, bits=64, generator=generator)
    gains = torch.randint(32, 97, shape, generator=generator, device=where, dtype=torch.uint8)
    keys, values = (torch.randn(*shape, DIM, generator=generator, device=where, dtype=torch.bfloat16) for _ in range(2))

    # The bytes that must move: what a stage reads once and what it writes for the next.
    kept, listed, ranked = KV_HEADS * k * DIM * 4, KV_HEADS * k * 8, KV_HEADS * tokens * 4
    floors: dict[str, int] = {}
    forms: dict[str, list[Callable[[], Any]]] = {}
    for name, group, gain in FORMS:
        held = KV_HEADS * tokens * (8 + gain)
        floors |= {
            f"{name}: score": held + ranked, f"{name}: select": ranked + listed, f"{name}: attend": kept + listed,
            f"{name}: whole": held + kept,
        }  # fmt: skip
        given = [(codes[i], gains[i] if gain else None, keys[i], values[i]) for i in range(sets)]
        for stage, run in _stages(query, projection, k, Choice(DIM**-0.5, group)).items():
            forms[f"{name}: {stage}"] = [functools.partial(run, *each) for each in given]
        lists = [pipeline.choose(query, projection, Cached(*each[:2]), k, Choice(DIM**-0.5, group)) for each in given]
        forms[f"{name}: attend"] = [
            functools.partial(pipeline.sparse_attention, query, keys[i], values[i], lists[i]) for i in range(sets)
        ]
    rounded = pipeline.quantize_query(query, projection).values
    floors["paper: score"] = KV_HEADS * tokens * 12
    forms["paper: score"] = [functools.partial(paper.popcount_scores, rounded, codes[i]) for i in range(sets)]
    for name, attention in (("SDPA", scaled_dot_product_attention), ("split-KV (ours)", dense.split(where))):
        step = functools.partial(paper.paper_step, k=k, attention=attention)
        floors[f"paper, {name}: whole"] = KV_HEADS * tokens * 8 + kept
        forms[f"paper, {name}: whole"] = [
            functools.partial(step, query, projection, codes[i], keys[i], values[i]) for i in range(sets)
        ]
    notes: dict[str, str] = {}
    right = dense.exact(query, keys[0], values[0])
    for name, function in dense.gpu_forms(where).items():
        name = f"dense: {name}"
        floors[name] = KV_HEADS * tokens * DIM * 4
        if isinstance(function, str):
            notes[name] = function
            continue
        try:
            error = dense.error(function(query, keys[0], values[0]), right)
        except Exception as fault:
            notes[name] = reason(fault)
            continue
        if not error < 0.02:
            notes[name] = f"not measured: its result is off by {error:.1e}"
            continue
        forms[name] = [functools.partial(function, query, keys[i], values[i]) for i in range(dense_sets)]

    replayed = timed(forms, repeats, graphs=True)
    eager = timed({name: calls[:32] for name, calls in forms.items()}, -(-repeats // 2), graphs=False)
    for name, _, _ in FORMS:  # some stages cannot run alone: their times are differences
        for kind in (replayed, eager):
            before, scored, chosen = (kind.pop(f"{name}: {stage}") for stage in ("prep", "prep to score", "choose"))
            kind |= {f"{name}: prep": before, f"{name}: score": _less(scored, before)}
            kind |= {f"{name}: select": _less(chosen, scored)}
    yield from _rows(replayed, eager, floors, notes, rate)
    yield from _ratios(replayed)


def _sets(tokens: int) -> tuple[int, int]:
    """How many working sets are too many for the caches: of the codes, and of all keys and values."""
    if not torch.cuda.is_available():
        return 2, 1
    cache = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    memory = int(0.4 * torch.cuda.mem_get_info()[0])
    room = max(1, min(memory, 16 << 30) // (KV_HEADS * tokens * (DIM * 4 + 9)))
    sets = max(1, min(-(-cache // (KV_HEADS * tokens * 8)), room, 256))
    return sets, min(sets, max(2, -(-cache // (KV_HEADS * tokens * DIM * 4))))


def _stages(query: Tensor, projection: Tensor, k: int, choice: Choice) -> dict[str, Callable[..., Any]]:
    """Functions of codes `[1, H_KV, N, 1]`, gains, keys and values, each with the stages before it."""

    def prep(codes: Tensor, gains: Tensor | None, keys: Tensor, values: Tensor) -> pipeline.Ranking:
        return pipeline.prepare(query, projection, Cached(codes, gains), k, choice)

    def scored(codes: Tensor, gains: Tensor | None, keys: Tensor, values: Tensor) -> None:
        pipeline.rank(prep(codes, gains, keys, values), Cached(codes, gains), choice)

    def chosen(codes: Tensor, gains: Tensor | None, keys: Tensor, values: Tensor) -> Tensor:
        return pipeline.choose(query, projection, Cached(codes, gains), k, choice)

    def whole(codes: Tensor, gains: Tensor | None, keys: Tensor, values: Tensor) -> Tensor:
        # As the cache calls it: eager times have the cost of the operators too.
        chosen = dispatch.choose(query, projection, Cached(codes, gains), k, choice)
        return dispatch.sparse_attention(query, keys, values, chosen)

    return {"prep": prep, "prep to score": scored, "choose": chosen, "whole": whole}


def _less(samples: list[float] | str, before: list[float] | str) -> list[float] | str:
    if isinstance(samples, str) or isinstance(before, str):
        return samples if isinstance(samples, str) else before
    return [a - b for a, b in zip(samples, before, strict=True)]


def _rows(
    replayed: dict[str, Any], eager: dict[str, Any], floors: dict[str, int], notes: dict[str, str], rate: float
) -> Iterator[dict[str, Any]]:
    """One row per form; the stages of BPC in the order in which they run."""
    order = ("prep", "score", "select", "attend", "whole")
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
