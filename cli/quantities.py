"""Sizes, times and heads as text."""

__all__ = ["duration_text", "heads_text", "size_text"]


def size_text(count: float) -> str:
    """Bytes, like 5.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration_text(seconds: float) -> str:
    """A time, like 3 min 20 s."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{seconds / 3600:.1f} h"


def heads_text(kv_heads: int, query_heads: int, head_dim: int) -> str:
    """The heads of a model, like 8 KV heads of 128, 32 query heads."""
    return f"{kv_heads} KV head{'s' * (kv_heads > 1)} of {head_dim}, {query_heads} query head{'s' * (query_heads > 1)}"
