"""What compiled kernels serve."""

import torch

from bpc_calib.backends.protocol import Request

__all__ = ["DTYPES", "MOST_DIM", "MOST_HEADS", "MOST_ROWS", "MOST_TOKENS", "unserved"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_HEADS, MOST_DIM = 16, 256
MOST_ROWS, MOST_TOKENS = 65535, 1 << 22  # on a GPU: KV heads of all sequences, and tokens


def unserved(request: Request, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str | None:
    """What about a call is beyond the kernels of both compiled backends; None: nothing is."""
    tensor = request.tensor
    if tensor.dim() != 4:
        return f"{tensor.dim()} dimensions instead of 4"
    if tensor.dtype not in dtypes:
        return f"dtype {tensor.dtype}"
    if request.heads > MOST_HEADS:
        return f"{request.heads} query heads per KV head, more than {MOST_HEADS}"
    if tensor.shape[-1] > MOST_DIM:
        return f"head_dim {tensor.shape[-1]}, above {MOST_DIM}"
    if not request.contiguous:
        return "a last dimension that is not contiguous"
    return None
