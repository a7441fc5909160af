"""The lengths that a code may have. Importing this file is cheap, since commands check their options with it."""

__all__ = ["BITS"]

BITS = (32, 64, 128)
