"""What the numbers that users give must be. Importing this file is cheap: commands check with it."""

from numbers import Integral

from bpc_artifacts.bits import BITS
from bpc_calib.errors import InputError

__all__ = ["check_bits", "check_count", "check_flag", "check_seed"]


def check_count(name: str, value: int, least: int = 1, most: int | None = None) -> None:
    """Raise `InputError` unless a value is an integer within these bounds."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        allowed = f"an integer of at least {least}" if most is None else f"{least:,} to {most:,}"
        raise InputError(f"{name} must be {allowed}, not {f'{value:,}' if whole else repr(value)}")


def check_flag(name: str, value: bool) -> None:
    """Raise `InputError` unless a value is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, not {value!r}")


def check_seed(seed: int) -> None:
    """Raise `InputError` unless torch and the artifact can have this seed."""
    check_count("seed", seed, 0)
    if seed >= 1 << 63:
        raise InputError(f"seed must be below 2^63, not {seed}")


def check_bits(bits: int) -> None:
    """Raise `InputError` unless `bits` is a supported code length."""
    if not isinstance(bits, int) or bits not in BITS:
        raise InputError(f"bits must be 32, 64 or 128, not {bits}")
