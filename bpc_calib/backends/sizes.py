"""The largest sizes that compiled kernels serve. Importing this file is cheap: `bpc bench` checks with it."""

__all__ = ["MOST_DIM", "MOST_HEADS", "MOST_ROWS", "MOST_TOKENS"]

MOST_HEADS, MOST_DIM = 16, 256  # query heads per KV head, and numbers of a key
MOST_ROWS, MOST_TOKENS = 65535, 1 << 22  # on a GPU: KV heads of all sequences, and tokens
