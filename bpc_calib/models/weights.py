"""Tell two sets of weights apart without reading all of them."""

import hashlib
from typing import Any

import torch

__all__ = ["weights_identity"]

LOOKED_AT = 4096  # bytes per tensor: training or quantising changes nearly all bytes of a tensor


def weights_identity(model: Any) -> dict[str, str]:
    """Return the dtype of a model and a hash of its tensors: their names, shapes, dtypes, and some of their bytes.

    Of tensors that are not in memory (offloaded to a disk) or not plain (packed by a quantiser), it covers the names,
    shapes and dtypes only. Processes that share out the model call this together, and get what one process gets.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if hasattr(tensor, "full_tensor"):  # a share of it
            tensor = tensor.full_tensor()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        if not tensor.is_meta and type(tensor) is torch.Tensor:
            numbers = tensor.detach().flatten()
            step = max(1, numbers.numel() * numbers.element_size() // LOOKED_AT)
            digest.update(numbers[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {"dtype": str(model.dtype).removeprefix("torch."), "sha256": digest.hexdigest()}
