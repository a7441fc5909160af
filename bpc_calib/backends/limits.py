"""What compiled kernels serve, and on which devices."""

import os

import torch
from torch import Tensor

from bpc_calib.backends.sizes import MOST_DIM, MOST_HEADS
from bpc_calib.method.state import State

__all__ = ["DTYPES", "capability", "tight", "unfit", "unserved"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (8, 0)  # compute capability


def unserved(tensor: Tensor, state: State | None, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str | None:
    """What about a call is beyond the kernels of both compiled backends; None: nothing is.

    Args:
        tensor, state: as in `Backend.serves`.
        dtypes: of queries and keys that the kernels serve.
    """
    if tensor.dim() != 4:
        return f"{tensor.dim()} dimensions instead of 4"
    if tensor.dtype not in dtypes:
        return f"dtype {tensor.dtype}"
    if tensor.shape[-1] > MOST_DIM:
        return f"head_dim {tensor.shape[-1]}, above {MOST_DIM}"
    if state is None:
        return None
    if tensor.shape[2] > MOST_HEADS:
        return f"{tensor.shape[2]} query heads per KV head, more than {MOST_HEADS}"
    if state.keys.stride(-1) != 1 or state.values.stride(-1) != 1:
        return "a last dimension that is not contiguous"
    return None


def tight(tensor: Tensor) -> Tensor:
    """Return a tensor of any shape with a contiguous last dimension, which all kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def unfit(device: torch.device) -> str | None:
    """Why compiled kernels cannot run on a device; None: they can, or Triton interprets them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"needs a GPU, and the tensors are on {device.type}"
    if (found := capability(device)) < OLDEST:
        return f"the kernels need a GPU of compute capability 8.0, and this one has {'.'.join(map(str, found))}"
    return None


def capability(device: torch.device) -> tuple[int, int]:
    """NVIDIA's compute capability; elsewhere one that is served."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return OLDEST
    return torch.cuda.get_device_capability(device)
