"""What the numbers of a calibration must be, on any model. Importing this file is cheap: commands check with it."""

from bpc_calib.errors import InputError
from bpc_calib.method.numbers import check_bits, check_count, check_seed

__all__ = ["SEQUENCE_LENGTH", "fitted_keys", "held_out_samples", "spread"]

SEQUENCE_LENGTH = 8192
MOST_SAMPLES, MOST_LENGTH = 1 << 20, 1 << 24  # more than any text has; lists of them still fit in memory
LEAST_PER_BIT = 2  # fitted keys: with one per bit, other keys have 3 times their residual; with two, 1.8 times
HELD_OUT = 16  # one sample in so many is held out


def held_out_samples(samples: int) -> list[int]:
    """Return the indices of the held-out samples: about 1 in 16, at least one, spread evenly; none of one sample.

    Their keys are kept aside, and measure the projections on text that these were not fitted to.
    """
    return spread(samples, max(1, samples // HELD_OUT) if samples > 1 else 0)


def spread(samples: int, count: int) -> list[int]:
    """Return the indices of `count` samples, spread evenly."""
    return [(2 * i + 1) * samples // (2 * count) for i in range(count)]


def fitted_keys(samples: int, length: int, keys_per_head: int, bits: int, seed: int) -> int:
    """Check the numbers of a calibration; return how many keys per KV head are fitted.

    Raises:
        InputError: a number is out of range, or there are too few keys for the bits.
    """
    check_bits(bits)
    check_count("samples", samples, 1, MOST_SAMPLES)
    check_count("sequence length", length, 1, MOST_LENGTH)
    check_count("keys per head", keys_per_head)
    check_seed(seed)
    kept = min(keys_per_head, (samples - len(held_out_samples(samples))) * length)
    least = LEAST_PER_BIT * bits
    if kept < least:
        raise InputError(
            f"{kept} fitted keys per head are too few for {bits} bits, which need at least {least}: raise "
            f"{'the keys per head' if kept == keys_per_head else 'the samples or their length'}"
        )
    return kept
