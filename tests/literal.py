"""Algorithms 1 to 3 of the paper, implemented line by line in float64 with plain loops: slow on purpose."""

import math

import numpy as np
import torch
from torch import Tensor


def sign(x: Tensor) -> Tensor:
    """Return torch.sign with sign(0) = +1."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def decompose(keys: Tensor, draws: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Run Algorithm 1 on keys `[N, D]` and draws `[H, D]`; return `U [N, H]`, `P [H, D]` and `R [N, D]`."""
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


def encode(keys: Tensor, projection: Tensor, in_metric: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Run Algorithm 2; return `U [N, H]`, the running values `r v^T [N, H]` before the sign, and the residual.

    `in_metric` holds the rows of `P M`, for products in a metric.
    """
    residual = keys.double().numpy().copy()  # numpy: a third of the time of torch for so small arrays
    codes, running = [], []
    in_metric = projection if in_metric is None else in_metric
    for v, v_in_metric in zip(projection.double().numpy(), in_metric.double().numpy(), strict=True):
        t = residual @ v_in_metric
        u = np.where(t >= 0, 1.0, -1.0)
        residual -= np.outer(u, v)
        codes.append(u)
        running.append(t)
    return torch.from_numpy(np.stack(codes, 1)), torch.from_numpy(np.stack(running, 1)), torch.from_numpy(residual)


def encode_nibbles(keys: Tensor, vectors: Tensor, in_metric: Tensor) -> Tensor:
    """Search for the sums of vectors `[16 m, D]`, one of each 16, nearest to the keys; return `[N, 16 m]` of 0 and 1.

    With the residuals of up to four partial sums for each key. `in_metric` holds the vectors in the metric.
    """
    keys = keys.double()
    left, cost, taken = keys.unsqueeze(1), torch.zeros(len(keys), 1).double(), torch.zeros(len(keys), 1, 0)
    for stage, stage_in_metric in zip(vectors.split(16), in_metric.split(16), strict=True):
        change = (stage * stage_in_metric).sum(-1) - 2 * left @ stage_in_metric.T
        candidates = (cost.unsqueeze(-1) + change).flatten(1)
        order = torch.from_numpy(ranks(candidates).argsort(-1, kind="stable")[:, :4])  # of equal ones the first
        old, new = order // 16, order % 16
        cost = candidates.gather(1, order)
        left = torch.stack([rows[own] for rows, own in zip(left, old, strict=True)]) - stage[new]
        taken = torch.stack([rows[own] for rows, own in zip(taken, old, strict=True)])
        taken = torch.cat([taken, torch.eye(16)[new]], -1)
    return taken[:, 0].double()


def ranks(costs: Tensor) -> np.ndarray:
    """Return what sorts candidates: their costs in float32 as ordered integers without their 6 lowest bits."""
    bits = costs.float().numpy().view(np.int32)
    return np.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) >> 6


def gain(key: Tensor, approximation: Tensor, in_metric: Tensor | None = None) -> int:
    """Return the gain byte of one key; `in_metric` is `k M`, for products in a metric."""
    in_metric = key if in_metric is None else in_metric
    squared, dot = float(in_metric @ key), float(in_metric @ approximation)
    if squared == 0:
        return 32
    if dot <= 0:
        return 255
    return min(255, max(0, round(64 * squared / dot - 32)))  # Python rounds half to even


def denominator(scores: list[float], logit: float | None, places: list[int] | None = None) -> float:
    """Return the logarithm of the denominator of a head's softmax, in the unit of its scores.

    Integers: only the best key of each stripe counts, `places` are those of the keys, and between powers of two the
    power and the logarithm are straight lines.
    """
    best = max(scores)
    if logit is None:
        return best
    if isinstance(best, float):
        return best + logit * math.log(sum(math.exp((score - best) / logit) for score in scores))
    octave = np.float32(int(min(max(np.float32(math.log(2)) * np.float32(logit), 1), 1 << 17)))
    stripes = dict.fromkeys(range(64), -(1 << 23))
    for place, score in zip(places or range(len(scores)), scores, strict=True):
        stripes[place % 64] = max(stripes[place % 64], score)
    total = 0
    for score in stripes.values():
        halvings, part = divmod(int(np.float32(best - score) * (np.float32(128) / octave)), 128)
        total += (1 << 23) * (256 - part) // 256 >> halvings
    total = int(np.float32(total))
    doublings = total.bit_length() - 24
    part = 128 * total // (1 << 23 + doublings) - 128
    return best + int(np.float32(128 * doublings + part) * (octave / 128))


def group_scores(
    scores: list[list[float]], group: str, logit: float | None = None, places: list[int] | None = None
) -> list[float]:
    """Return one score per key from the scores per query head; all keys are valid, and lie at `places`."""
    if group == "relative":
        below = []
        for head in scores:
            whole = denominator(head, logit, places)
            below.append([score - whole for score in head])
        least = -float("inf")
        if logit is not None:
            least = -16 * logit if isinstance(scores[0][0], float) else -int(min(np.float32(16 * logit), 1 << 24))
        return [
            4 * len(scores) * max(column) + sum(max(score, least) for score in column)
            for column in zip(*below, strict=True)
        ]
    return [max(column) for column in zip(*scores, strict=True)]


def bit_plane_score(query: list[int], code: list[int]) -> int:
    """Run Algorithm 3, with XOR as disagreement: `code` holds bits, 1 for +1; `query` holds int8 values."""
    sign_bits = [int(q >= 0) for q in query]
    score = 0
    for j in range(7):
        for q, s, h in zip(query, sign_bits, code, strict=True):
            if abs(q) >> j & 1:
                score += (1 << j) * (1 if s == h else -1)
    return score
