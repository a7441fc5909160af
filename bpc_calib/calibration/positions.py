"""Where calibration looks: the positions of the kept keys, and the first position of each sample."""

import heapq
import random

from bpc_calib.calibration.plan import Plan

__all__ = ["first_positions", "key_positions", "shift_offsets", "spread_positions"]

EARLY = 128  # positions from which on the density of kept keys falls


def key_positions(plan: Plan) -> list[list[int]]:
    """Return, for each sample, the ascending indices of the tokens whose keys are kept.

    The fitted samples share `plan.keys_per_head`; every held-out sample has as many as a fitted one, at least one.
    """
    fitted, held_out = plan.fitted, plan.held_out
    chosen: list[list[int]] = [[]] * plan.samples
    for samples, keys, use in (
        (fitted, plan.keys_per_head, "positions"),
        (held_out, plan.held_out_keys_per_head, "held-out-positions"),
    ):
        rng = random.Random(f"{plan.seed}/{use}")
        spread = spread_positions(len(samples), plan.sequence_length, keys, rng)
        for sample, positions in zip(samples, spread, strict=True):
            chosen[sample] = positions
    return chosen


def first_positions(plan: Plan) -> list[int]:
    """Return the position of the first token of each sample: 0 without a position shift."""
    if not plan.position_shift:
        return [0] * plan.samples
    limit = plan.model.context_limit or plan.sequence_length
    return shift_offsets(plan.samples, plan.sequence_length, limit, random.Random(f"{plan.seed}/position-shift"))


def shift_offsets(samples: int, length: int, limit: int, rng: random.Random) -> list[int]:
    """Draw the first position of each sample of `length` tokens, from 0 to `limit - length`; two of three are 0.

    Shifted samples have the RoPE rotations of long contexts. Short and long contexts both contain the early
    positions, so only every third sample is shifted, by an offset from one of equal parts of the room.
    """
    shifted = samples // 3
    offsets = [int((limit - length + 1) * (part + rng.random()) / shifted) for part in range(shifted)]
    offsets += [0] * (samples - shifted)
    rng.shuffle(offsets)
    return offsets


def spread_positions(samples: int, length: int, keys: int, rng: random.Random) -> list[list[int]]:
    """Draw ascending positions in `[0, length)` for each sample, more of the early ones, which every context has.

    The density at a position is in proportion to `1 / (position + EARLY)`. All samples together have at most `keys`
    positions, and the counts of two samples differ by at most one.
    """
    if keys >= samples * length:
        return [list(range(length))] * samples
    chosen = []
    for sample in range(samples):
        count = keys * (sample + 1) // samples - keys * sample // samples
        # The smallest of exponential numbers with these rates: a draw without replacement (Efraimidis and Spirakis).
        times = [rng.expovariate(1.0) * (position + EARLY) for position in range(length)]
        chosen.append(sorted(heapq.nsmallest(count, range(length), key=times.__getitem__)))
    return chosen
