"""The stages of a step, which only benchmarks time: here alone do other parts call a backend's own functions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.method import step
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.scoring import hash_scores, quantize_query
from bpc_calib.method.state import Rows, State, read_codes

__all__ = ["stages_of"]

Stages = dict[str, Callable[[State], Any]]
Attend = Callable[[State, Tensor], Tensor]


def stages_of(query: Tensor, codebook: Codebook, rows: Rows, rules: Rules) -> tuple[Stages, Attend]:
    """Return functions of a state: `project`, `score` and `select`, each with those before it; and attention.

    Attention takes a state and what `select` returned, the tokens `[B, H_KV, k]`.

    Args:
        query, codebook, rows, rules: as in `sparse_decode`.
    """
    make = {"native": _on_cpu, "triton": _in_triton, "torch": _in_torch}[dispatch.backend(query.device)]
    return make(query, codebook, rows, rules)


def _on_cpu(query: Tensor, codebook: Codebook, rows: Rows, rules: Rules) -> tuple[Stages, Attend]:
    from bpc_calib.backends.cpu import backend, native

    def until(stages: int) -> Callable[[State], Tensor]:
        return lambda state: backend.rank(query, codebook, state, rows, rules, stages=stages)[0]

    scored = native.PROJECT | native.SCORE
    stages = {"project": until(native.PROJECT), "score": until(scored), "select": until(scored | native.SELECT)}
    return stages, lambda state, chosen: backend.attend(query, state, rows, chosen, rules.scaling)


def _in_triton(query: Tensor, codebook: Codebook, rows: Rows, rules: Rules) -> tuple[Stages, Attend]:
    from bpc_calib.backends.triton import pipeline

    none = Rows(torch.zeros_like(rows.lengths), torch.zeros_like(rows.k), 0, 0)  # of no token there is no score
    plain = replace(rules, group="max", gain=False)

    def score(state: State) -> None:
        pipeline.rank(pipeline.score(query, codebook, state, rows, rules), state, rows, rules)

    return {
        "project": lambda state: pipeline.score(query, codebook, state, none, plain),
        "score": score,
        "select": lambda state: pipeline.choose(query, codebook, state, rows, rules),
    }, lambda state, chosen: pipeline.attend(query, state, rows, chosen, rules.scaling)


def _in_torch(query: Tensor, codebook: Codebook, rows: Rows, rules: Rules) -> tuple[Stages, Attend]:
    def project(state: State) -> Any:
        return quantize_query(query, codebook.projection, nibbles=codebook.nibbles)

    def score(state: State) -> Tensor:
        rounded, (codes, gain) = project(state), read_codes(state, rows)
        scaling = rules.scale(query.shape[-1])
        scores = hash_scores(rounded, codes, gain)
        return step.rank(scores, rounded.scale, group=rules.group, gain=gain is not None, scaling=scaling)

    return {
        "project": project,
        "score": score,
        "select": lambda state: step.best(project(state), state, rows, rules, query.shape[-1]),
    }, lambda state, chosen: step.attend(query, state, rows, chosen, rules.scaling)
