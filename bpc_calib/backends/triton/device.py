"""Which GPUs the kernels run on. Needs no Triton."""

import os

import torch

__all__ = ["capability", "unfit"]

OLDEST = (8, 0)


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
