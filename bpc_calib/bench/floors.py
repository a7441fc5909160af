"""Bytes that cannot but move, and the time that they take at the memory's bandwidth."""

__all__ = ["code_bytes", "decode_bytes", "dense_bytes", "least_microseconds", "stage_bytes"]


def dense_bytes(rows: int, tokens: int, dim: int, itemsize: int) -> int:
    """Keys and values of `tokens` in each of `rows`, KV heads of sequences."""
    return rows * tokens * dim * 2 * itemsize


def code_bytes(rows: int, tokens: int, *, bits: int = 64, gain: bool = True) -> int:
    """Codes, and a byte of gain each."""
    return rows * tokens * (8 * -(-bits // 64) + gain)


def stage_bytes(rows: int, tokens: int, k: int, dim: int, itemsize: int) -> dict[str, int]:
    """Of the stages of a step that a cache has floors for, and of the whole: scores need not leave the processor."""
    codes, kept = code_bytes(rows, tokens), dense_bytes(rows, k, dim, itemsize)
    return {"score": codes, "attend": kept, "step": codes + kept}


def decode_bytes(weights: int, batch: int, cache: int) -> int:
    """Of a step of a model: its weights once, but for the embedding, and what it reads of each sequence's cache."""
    return weights + batch * cache


def least_microseconds(size: int, bytes_per_second: float) -> float:
    """Microseconds."""
    return 1e6 * size / bytes_per_second
