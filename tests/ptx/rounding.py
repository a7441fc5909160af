"""Floats of 8, 10 and 11 bits of fraction as numpy lacks them: bfloat16 and TF32."""

from typing import Any

import numpy as np

__all__ = ["from_bfloat16", "from_half", "from_tf32", "to_bfloat16", "to_tf32"]


def from_bfloat16(bits: Any) -> Any:
    """float32 of uint16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: Any) -> Any:
    """uint16 of float32: to the nearest, half to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def from_half(bits: Any, kind: str) -> Any:
    """float32 of uint16 that are "bf16" or "f16"."""
    return from_bfloat16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def to_tf32(bits: Any) -> Any:
    """uint32 of the bits of float32: to the nearest, half away from 0."""
    return (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def from_tf32(bits: Any) -> Any:
    """float32 of uint32, of which a matrix product reads the upper 19 bits."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)
