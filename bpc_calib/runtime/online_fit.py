"""What a prompt gives: online projections fitted to some of its keys, and the metric of some of its queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.backends.dispatch import find
from bpc_calib.method.fitting import Fit, mean_key
from bpc_calib.method.metric import score_metric, second_moment

__all__ = [
    "ASKED", "Asked", "fit_online", "fitted_places", "join", "moment_metric", "observed_places", "prompt_metric",
    "prompt_moment", "spread",
]  # fmt: skip

# An online fit delays the first step, so it is short: 4 iterations per bit, as in the authors' release, 2 rounds of
# least squares, and at most so many keys: more keys do not improve it (docs/projections.md).
ITERATIONS, ROUNDS, FITTED = 4, 2, 1024
ASKED = 512  # queries that are kept of a prompt, as many as the metric needs
NEWEST = 64  # of these the last tokens, because the next queries are most like them


@dataclass(frozen=True)
class Asked:
    """Queries of the prompt, for the metric."""

    queries: Tensor  # [batch, query_heads, n, head_dim]
    places: Tensor  # int64 [n], ascending: their tokens in the cache


def spread(count: int, most: int) -> Tensor:
    """Return at most `most` indices below `count`, ascending and evenly spaced; the last is always among them."""
    return (torch.arange(1, min(count, most) + 1) * count) // min(count, most) - 1


def fitted_places(count: int) -> Tensor:
    """Return the at most `FITTED` of `count` keys that projections are fitted to, without padding."""
    return spread(count, FITTED)


def observed_places(count: int) -> Tensor:
    """Return the at most `ASKED` of `count` queries that are kept: the `NEWEST`, and others evenly spaced."""
    if count <= ASKED:
        return torch.arange(count)
    return torch.cat([spread(count - NEWEST, ASKED - NEWEST), torch.arange(count - NEWEST, count)])


def join(asked: Asked | None, queries: Tensor, places: Tensor) -> Asked:
    """Add queries `[batch, query_heads, n, head_dim]` at `places [n]` to those that are kept."""
    kept = observed_places(len(places)).to(places.device)
    queries, places = queries.index_select(2, kept.to(queries.device)).detach(), places[kept]
    if asked is None:
        return Asked(queries, places)
    queries, places = torch.cat([asked.queries, queries], dim=2), torch.cat([asked.places, places])
    kept = observed_places(len(places)).to(places.device)
    return Asked(queries.index_select(2, kept.to(queries.device)), places[kept])


def prompt_moment(asked: Asked, kv_heads: int, visible: Tensor | None) -> Tensor:
    """Return the sum of `q^T q` over the queries of each KV head, float64 `[batch, kv_heads, head_dim, head_dim]`.

    Args:
        asked: queries of the prompt.
        kv_heads: of the layer.
        visible: bool `[batch, N]`, False for padding, whose queries do not count; None: no padding.
    """
    queries = asked.queries.unflatten(1, (kv_heads, -1))
    if visible is not None:
        queries = queries * visible[:, None, None, asked.places.to(visible.device), None]
    return second_moment(queries.flatten(2, 3))


def moment_metric(moment: Tensor) -> Tensor:
    """Return the metric of queries with these moments `[..., head_dim, head_dim]`, of any scale: float32."""
    # On the CPU: libraries for a GPU take matrices of this size one after the other.
    return score_metric(moment.cpu()).to(moment.device)


def prompt_metric(asked: Asked, kv_heads: int, visible: Tensor | None) -> Tensor:
    """Return the metric of the queries of each KV head, float32; see `prompt_moment`."""
    return moment_metric(prompt_moment(asked, kv_heads, visible))


def fit_online(keys: Tensor, asked: Asked | None, visible: Tensor | None, bits: int, seed: int) -> Fit:
    """Fit projections to cached keys.

    Args:
        keys: `[batch, kv_heads, N, head_dim]`.
        asked: queries of the same tokens; None: no metric.
        visible: bool `[batch, N]`, False for padding; None: no padding.
        bits: code length.
        seed: of the draws of the decomposition.
    """
    metric, weights = None if asked is None else prompt_metric(asked, keys.shape[1], visible), None
    if visible is None:
        keys = keys[:, :, fitted_places(keys.shape[2]).to(keys.device)]
    else:  # all of them, because a short sequence in a long batch has few
        weights = visible.unsqueeze(1).expand(keys.shape[:3])
    return find(keys).fit(
        keys,
        bits,
        iterations=ITERATIONS,
        rounds=ROUNDS,
        metric=metric,
        mean=mean_key(keys, weights),
        weights=weights,
        generator=torch.Generator().manual_seed(seed),
    )
