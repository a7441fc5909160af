"""Bytes that a measurement needs, compared with those that are free before anything is filled."""

import gc
from collections.abc import Callable, Sequence

import torch

from bpc_calib.bench.machine import available_memory

__all__ = ["decode_bytes", "free", "lacking", "longest", "working_sets"]

SPARE = 1 << 30  # for the CUDA context, the libraries' workspaces and what the allocator rounds up


def free(device: torch.device) -> int:
    """Bytes that a tensor can still get, with those that torch's allocator holds and does not use."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return max(0, available_memory(device) - (SPARE if device.type == "cuda" else 0))


def lacking(needed: int, available: int) -> str | None:
    """Why there is too little memory; None: there is enough."""
    if needed <= available:
        return None
    return f"not measured: it needs {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free"


def longest(lengths: Sequence[int], needed: Callable[[int], int], available: int) -> tuple[int | None, list[str]]:
    """The first length that fits, or None, and why each before it does not."""
    skipped: list[str] = []
    for tokens in lengths:
        why = lacking(needed(tokens), available)
        if why is None:
            return tokens, skipped
        skipped.append(f"{tokens:,} tokens {why}")
    return None, skipped


def decode_bytes(tokens: int, layers: int, layer_token: int, kv_heads: int, *, copies: int = 1) -> int:
    """What decoding after `tokens` needs beside the weights.

    Args:
        layer_token: bytes of the keys and values of a token in a layer.
        copies: of the whole cache; a `DynamicCache` in a CUDA graph has two.
    """
    room = tokens + max(256, tokens // 16) + 16  # as the buffers of a cache grow
    hashed = kv_heads * (8 + 1 + 4 + 4)  # code, gain, error and order of the errors
    layer = room * layer_token
    return copies * layers * (layer + room * hashed) + 3 * layer  # a layer is drawn, copied and hashed at a time


def working_sets(tokens: int, code_bytes: int, key_bytes: int, cache: int, available: int) -> tuple[int, int]:
    """How many working sets are too many for the caches, of the codes, and of all keys and values; 0: none fits.

    Args:
        code_bytes, key_bytes: of a token's codes, and of its keys and values.
        cache: bytes that the sets must exceed.
    """
    a_set = tokens * (key_bytes + 2 * code_bytes)
    check = 3 * tokens * key_bytes  # one KV head in float64, and what a form of dense attention copies
    room = min(int(0.8 * available) - check, 16 << 30)
    if a_set > int(0.8 * available) - check:
        return 0, 0
    sets = max(1, min(-(-cache // (tokens * code_bytes)), room // a_set, 256))
    return sets, min(sets, max(2, -(-cache // (tokens * key_bytes))))
