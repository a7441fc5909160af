"""Which KV heads a process holds, where the heads of a model are shared out over processes (tensor parallelism)."""

from typing import Any

__all__ = ["first_head", "held_heads", "rank_among", "share", "tensor_ranks"]


def first_head(total: int, rank: int, ranks: int) -> int:
    """Return the first KV head of a rank: in order, or each head on several ranks where these are more."""
    return rank * (total // ranks) if total >= ranks else rank * total // ranks


def share(total: int, ranks: int) -> int | None:
    """Return how many KV heads a rank holds, 1 where each head is on several ranks; None: the shares are not equal."""
    if total >= ranks:
        return None if total % ranks else total // ranks
    return None if ranks % total else 1


def held_heads(total: int, held: int, rank: int, ranks: int) -> slice | None:
    """Return which of the `total` KV heads of a layer a rank holds that has `held`; None: `held` is no rank's share.

    Some models keep all heads on every rank, because they normalise over heads or split a fused projection.
    """
    if held == total:
        return slice(0, total)
    if held != share(total, ranks):
        return None
    first = first_head(total, rank, ranks)
    return slice(first, first + held)


def tensor_ranks(config: Any) -> int:
    """Return over how many processes transformers shares out the heads of a model with this config; 1: not at all."""
    distributed = getattr(config, "distributed_config", None)
    ranks = distributed.get("tp_size") if isinstance(distributed, dict) else getattr(distributed, "tp_size", None)
    return ranks or 1


def rank_among(ranks: int) -> int:
    """Return the number of this process among the `ranks` that share out a model; transformers gives them in a row."""
    import torch

    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() % ranks if started else 0
