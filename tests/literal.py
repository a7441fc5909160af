"""Algorithms 1 to 3 of the paper read line by line, in float64 and with plain loops: slow on purpose."""

import torch
from torch import Tensor


def sign(x: Tensor) -> Tensor:
    """torch.sign with sign(0) = +1."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def decompose(keys: Tensor, draws: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1 for keys `[N, D]` and draws `[H, D]`: `U [N, H]`, `P [H, D]`, `R`."""
    residual = keys.double().clone()
    codes, projection = [], []
    for draw in draws:
        v = draw
        for _ in range(iterations):
            u = sign(residual @ v)
            v = u @ residual / len(residual)
        residual = residual - torch.outer(u, v)
        codes.append(u)
        projection.append(v)
    return torch.stack(codes, dim=1), torch.stack(projection), residual


def encode(keys: Tensor, projection: Tensor, towards: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: `U [N, H]`, the running values `r v^T [N, H]` that gave the signs, and the residual.

    `towards` are the rows of `P M` where products are taken in a metric.
    """
    residual = keys.double().clone()
    codes, running = [], []
    for v, along in zip(projection.double(), (projection if towards is None else towards).double(), strict=True):
        t = residual @ along
        u = sign(t)
        residual = residual - torch.outer(u, v)
        codes.append(u)
        running.append(t)
    return torch.stack(codes, dim=1), torch.stack(running, dim=1), residual


def gain(key: Tensor, approximation: Tensor, along: Tensor | None = None) -> int:
    """The gain byte of one key; `along` is `k M` in a metric."""
    along = key if along is None else along
    squared, dot = float(along @ key), float(along @ approximation)
    if squared == 0:
        return 32
    if dot <= 0:
        return 255
    return min(255, max(0, round(64 * squared / dot - 32)))  # Python rounds half to even


def group_scores(scores: list[list[float]], group: str, limit: float | None = None) -> list[float]:
    """One score a key of those of each query head, all keys valid."""
    if group == "sum":
        return [sum(column) for column in zip(*scores, strict=True)]
    if group == "relative":
        below = list(zip(*([each - max(head) for each in head] for head in scores), strict=True))
        least = -float("inf") if limit is None else -limit
        return [4 * len(scores) * max(column) + sum(max(each, least) for each in column) for column in below]
    return [max(column) for column in zip(*scores, strict=True)]


def bit_plane_score(query: list[int], code: list[int]) -> int:
    """Algorithm 3 with XOR read as disagreement: `code` holds bits, 1 for +1; `query` int8 values."""
    sign_bits = [int(q >= 0) for q in query]
    score = 0
    for j in range(7):
        for q, s, h in zip(query, sign_bits, code, strict=True):
            if abs(q) >> j & 1:
                score += (1 << j) * (1 if s == h else -1)
    return score
