"""Where calibration looks: the positions of the kept keys, and the first position of each sample."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bpc_calib.calibration.plan import Plan

__all__ = ["early_keys", "first_positions", "key_positions", "shift_offsets", "spread_keys"]

EARLY = 128  # positions from which on the density of kept keys falls
CENTRED = 2048  # positions whose keys give the mean: RoPE turns the mean key, and every context has these positions


def key_positions(plan: Plan) -> list[list[int]]:
    """Return, for each sample, the ascending indices of the tokens whose keys are kept.

    The fitted samples share `plan.keys_per_head`, the held-out samples `plan.held_out_keys_per_head`.
    """
    offsets = first_positions(plan)
    chosen: list[list[int]] = [[]] * plan.samples
    for samples, keys, use in (
        (plan.fitted, plan.keys_per_head, "positions"),
        (plan.held_out, plan.held_out_keys_per_head, "held-out-positions"),
    ):
        own = [offsets[sample] for sample in samples]
        spread = spread_keys(own, plan.sequence_length, keys, random.Random(f"{plan.seed}/{use}"))
        for sample, indices in zip(samples, spread, strict=True):
            chosen[sample] = indices
    return chosen


def early_keys(plan: Plan) -> Tensor:
    """Return which kept keys of the fitted samples, sample by sample, are at positions below `CENTRED`: bool `[N]`."""
    positions, offsets = key_positions(plan), first_positions(plan)
    return torch.tensor([offsets[sample] + index < CENTRED for sample in plan.fitted for index in positions[sample]])


def first_positions(plan: Plan) -> list[int]:
    """Return the position of the first token of each sample: 0 without a position shift."""
    if not plan.position_shift:
        return [0] * plan.samples
    limit = plan.model.context_limit or plan.sequence_length
    return shift_offsets(plan.samples, plan.sequence_length, limit, random.Random(f"{plan.seed}/position-shift"))


def shift_offsets(samples: int, length: int, limit: int, rng: random.Random) -> list[int]:
    """Draw the first position of each sample, from 0 to `limit - length`; two of three are 0.

    Shifted samples have the RoPE rotations of long contexts. Short and long contexts both contain the early
    positions, so only every third sample is shifted, by an offset from one of equal parts of the room.

    Args:
        samples: number of samples.
        length: tokens of each sample.
        limit: positions of the model.
        rng: source of the draws.
    """
    offsets = [0] * samples
    shifted = range(1, samples, 3)
    drawn = [int((limit - length + 1) * (part + rng.random()) / len(shifted)) for part in range(len(shifted))]
    rng.shuffle(drawn)
    for sample, offset in zip(shifted, drawn, strict=True):
        offsets[sample] = offset
    return offsets


def spread_keys(offsets: Sequence[int], length: int, keys: int, rng: random.Random) -> list[list[int]]:
    """Draw at most `keys` keys of samples of `length` tokens: ascending indices in `[0, length)` for each sample.

    The keys of all samples together have a density in proportion to `1 / (position + EARLY)`, so contexts of every
    order of length count alike. Where samples hold fewer keys than that, all are kept.

    Args:
        offsets: the position of the first token of each sample.
        length: tokens per sample.
        keys: over all samples.
        rng: draws the keys.
    """
    if keys >= len(offsets) * length:
        return [list(range(length)) for _ in offsets]
    positions = np.asarray(offsets, np.int64)[:, None] + np.arange(length)
    samples_at = np.bincount(positions.ravel())
    # The smallest of exponential numbers with these rates: a draw without replacement (Efraimidis and Spirakis).
    # `RandomState` promises the same numbers in every version of NumPy.
    times = np.random.RandomState(rng.getrandbits(32)).standard_exponential(positions.shape)
    times *= (positions + EARLY) * samples_at[positions]
    drawn = np.zeros(times.size, bool)
    drawn[np.argpartition(times, keys, axis=None)[:keys]] = True
    return [np.flatnonzero(row).tolist() for row in drawn.reshape(times.shape)]
