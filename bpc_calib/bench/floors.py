"""Byte floors: the bytes that a step must move, and their time at the memory's bandwidth."""

__all__ = ["code_bytes", "decode_bytes", "dense_bytes", "least_microseconds", "stage_bytes"]


def dense_bytes(rows: int, tokens: int, dim: int, itemsize: int) -> int:
    """Return the bytes of keys and values: `tokens` in each of `rows` (KV heads of all sequences)."""
    return rows * tokens * dim * 2 * itemsize


def code_bytes(rows: int, tokens: int, *, bits: int = 64, gain: bool = True) -> int:
    """Return the bytes of codes, plus one byte per code for the gain."""
    return rows * tokens * (8 * -(-bits // 64) + gain)


def stage_bytes(rows: int, tokens: int, k: int, dim: int, itemsize: int) -> dict[str, int]:
    """Return the byte floors of scoring, of attention and of the whole step; scores need not leave the processor."""
    codes, kept = code_bytes(rows, tokens), dense_bytes(rows, k, dim, itemsize)
    return {"score": codes, "attend": kept, "step": codes + kept}


def decode_bytes(weights: int, batch: int, cache: int) -> int:
    """Return the byte floor of a model's step: `weights` once, and `cache` bytes per sequence."""
    return weights + batch * cache


def least_microseconds(size: int, bytes_per_second: float) -> float:
    """Return the microseconds that moving `size` bytes takes at this bandwidth."""
    return 1e6 * size / bytes_per_second
