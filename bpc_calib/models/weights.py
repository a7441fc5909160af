"""Which weights a model has, without reading all of them."""

import hashlib
from typing import Any

import torch

__all__ = ["weights_sha256"]

SAMPLED = 16  # numbers of each tensor


def weights_sha256(model: Any) -> str:
    """Return a hash of some numbers of every tensor of a model: other weights have another one.

    Another dtype or quantization has another one, too. Tensors that are not in memory are left out.
    """
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            continue
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].cpu().contiguous()
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
