"""The stages of a step of BPC on each backend, each going further than the one before."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.method import choosing
from bpc_calib.method.encoding import Encoder
from bpc_calib.method.scoring import GROUPS, hash_scores, quantize_query
from bpc_calib.method.selection import select

__all__ = ["STAGES", "choose", "cumulative", "step"]

STAGES = ("encode", "project", "score", "select", "attend", "step")
GROUP = GROUPS[0]  # the default of a cache


def cumulative(
    backend: str, query: Tensor, projection: Tensor, k: int
) -> dict[str, Callable[[Tensor, Tensor | None], Any]]:
    """`project`, `project to score`, `project to select`: functions of codes and gains, for queries `[B, H_KV, G, D]`.

    What a stage takes is the difference to what comes before it: on its own it could not run.
    """
    scaling = query.shape[-1] ** -0.5
    if backend == "torch":
        return _plain(query, projection, k, scaling)
    if backend == "numba":
        return _compiled(query, projection, k, scaling)
    from bpc_calib.backends.triton import pipeline

    def project(codes: Tensor, gain: Tensor | None) -> Any:
        return pipeline.prepare(
            query, projection, k, codes.shape[2], group=GROUP, gain=gain is not None, scaling=scaling
        )

    def scored(codes: Tensor, gain: Tensor | None) -> None:
        pipeline.rank(project(codes, gain), codes, gain, group=GROUP, valid=None, worst=None)

    def chosen(codes: Tensor, gain: Tensor | None) -> Tensor:
        return pipeline.choose(query, projection, codes, gain, k, scaling=scaling, group=GROUP)

    return {"project": project, "project to score": scored, "project to select": chosen}


def _compiled(query: Tensor, projection: Tensor, k: int, scaling: float) -> dict[str, Callable[..., Any]]:
    from bpc_calib.backends.cpu import choose, pipeline

    stages = {"project": choose.PROJECT, "project to score": choose.SCORE, "project to select": choose.SELECT}
    asked = functools.partial(pipeline.choose_asked, query, projection, scaling=scaling, group=GROUP)
    return {
        name: lambda codes, gain, last=last: asked(codes=codes, gain=gain, k=k, stages=last)
        for name, last in stages.items()
    }


def _plain(query: Tensor, projection: Tensor, k: int, scaling: float) -> dict[str, Callable[..., Any]]:
    def scored(codes: Tensor, gain: Tensor | None) -> Tensor:
        asked = quantize_query(query, projection)
        scores = hash_scores(asked, codes, gain)
        return choosing.rank(scores, asked.scale, group=GROUP, gain=gain is not None, scaling=scaling)

    return {
        "project": lambda codes, gain: quantize_query(query, projection),
        "project to score": scored,
        "project to select": lambda codes, gain: select(scored(codes, gain), k),
    }


def choose(query: Tensor, projection: Tensor, codes: Tensor, gain: Tensor | None, k: int) -> Tensor:
    """The tokens attended, as a cache chooses them."""
    return dispatch.choose(query, projection, codes, gain, k, scaling=query.shape[-1] ** -0.5, group=GROUP)


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
    """A whole step as a cache calls it: the new key gets its code, then tokens are chosen and attended."""
    dispatch.encode_with(encoder, new)
    return dispatch.sparse_attention(query, keys, values, choose(query, projection, codes, gain, k))
