"""What a decoding step of one layer calls: BPC by stage, the paper's pipeline, and every form of dense attention."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from gpu_exactness import random_codes
from gpu_timing import device, reason
from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.backends.triton import backend, pipeline
from bpc_calib.backends.triton.paper import popcount_scores
from bpc_calib.bench import dense, paper
from bpc_calib.method.budget import attended
from bpc_calib.method.choosing import Cached, Choice

__all__ = ["DIM", "FORMS", "GROUP", "KV_HEADS", "Layer"]

KV_HEADS, GROUP, DIM, BUDGET = 8, 4, 128, 0.02
FORMS = (("relative, gain", "relative", True), ("max, no gain", "max", False))

Calls = dict[str, list[Callable[[], Any]]]  # by form: one call for each working set


class Layer:
    """A layer's cache in several working sets, and the bytes that must move: `floors`, by form.

    A floor counts what a stage reads once and what it writes for the next.
    """

    def __init__(self, tokens: int, sets: int, dense_sets: int) -> None:
        where = device()
        self.tokens, self.sets, self.dense_sets = tokens, sets, dense_sets
        self.k = attended(tokens, BUDGET)
        generator = torch.Generator(where).manual_seed(0)
        self.query = torch.randn(1, KV_HEADS, GROUP, DIM, generator=generator, device=where).bfloat16()
        self.projection = torch.randn(KV_HEADS, 64, DIM, generator=generator, device=where)
        shape = (sets, 1, KV_HEADS, tokens)
        self.codes = random_codes(*shape, bits=64, generator=generator)
        self.gains = torch.randint(32, 97, shape, generator=generator, device=where, dtype=torch.uint8)
        self.keys, self.values = (
            torch.randn(*shape, DIM, generator=generator, device=where, dtype=torch.bfloat16) for _ in range(2)
        )
        self.kept = KV_HEADS * self.k * DIM * 4
        self.floors: dict[str, int] = {}

    def bpc(self, name: str, group: str, gain: bool) -> Calls:
        """The stages, each with those before it; `attend` alone and `whole` as the cache calls them."""
        listed, ranked, held = KV_HEADS * self.k * 8, KV_HEADS * self.tokens * 4, KV_HEADS * self.tokens * (8 + gain)
        self.floors |= {
            f"{name}: score": held + ranked, f"{name}: select": ranked + listed, f"{name}: attend": self.kept + listed,
            f"{name}: whole": held + self.kept,
        }  # fmt: skip
        query, projection, k, choice = self.query, self.projection, self.k, Choice(DIM**-0.5, group)
        given = [(self.codes[i], self.gains[i] if gain else None) for i in range(self.sets)]
        forms: Calls = {}
        for stage, run in backend.stages(query, projection, k, choice).items():
            forms[f"{name}: {stage}"] = [functools.partial(run, *each) for each in given]
        lists = [pipeline.choose(query, projection, Cached(*each), k, choice) for each in given]
        forms[f"{name}: attend"] = [
            functools.partial(pipeline.sparse_attention, query, self.keys[i], self.values[i], lists[i])
            for i in range(self.sets)
        ]

        def whole(codes: Tensor, gains: Tensor | None, keys: Tensor, values: Tensor) -> Tensor:
            # As the cache calls it: eager times have the cost of the operators too.
            chosen = dispatch.choose(query, projection, Cached(codes, gains), k, choice)
            return dispatch.sparse_attention(query, keys, values, chosen)

        forms[f"{name}: whole"] = [
            functools.partial(whole, *each, self.keys[i], self.values[i]) for i, each in enumerate(given)
        ]
        return forms

    def paper(self) -> Calls:
        """The paper's scores, and its whole step with two forms of attention on the copy."""
        rounded = pipeline.quantize_query(self.query, self.projection).values
        self.floors["paper: score"] = KV_HEADS * self.tokens * 12
        forms: Calls = {
            "paper: score": [functools.partial(popcount_scores, rounded, self.codes[i]) for i in range(self.sets)]
        }
        for name, attention in (("SDPA", dense.folded), ("split-KV (ours)", dense.ours(self.query.device))):
            step = functools.partial(paper.paper_step, attention, self.query, self.projection, k=self.k)
            self.floors[f"paper, {name}: whole"] = KV_HEADS * self.tokens * 8 + self.kept
            forms[f"paper, {name}: whole"] = [
                functools.partial(step, self.codes[i], self.keys[i], self.values[i]) for i in range(self.sets)
            ]
        return forms

    def dense(self, notes: dict[str, str]) -> Calls:
        """Every form of dense attention whose result is right; `notes` says why one is missing."""
        forms: Calls = {}
        right = dense.exact(self.query, self.keys[0], self.values[0])
        for name, function in dense.gpu_forms(self.query.device).items():
            name = f"dense: {name}"
            self.floors[name] = KV_HEADS * self.tokens * DIM * 4
            if isinstance(function, str):
                notes[name] = function
                continue
            try:
                error = dense.error(function(self.query, self.keys[0], self.values[0]), right)
            except Exception as fault:
                notes[name] = reason(fault)
                continue
            if not error < dense.TOLERANCE:
                notes[name] = f"not measured: its result is off by {error:.1e}"
                continue
            forms[name] = [
                functools.partial(function, self.query, self.keys[i], self.values[i]) for i in range(self.dense_sets)
            ]
        return forms
