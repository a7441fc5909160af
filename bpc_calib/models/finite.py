"""Whether a model's predictions are numbers: in 16 bits activations can overflow, and a file can be damaged."""

from typing import Any

from torch import Tensor

from bpc_calib.errors import ModelError
from bpc_calib.models.description import describe

__all__ = ["check_finite"]


def check_finite(logits: Tensor, model: Any) -> None:
    """Raise `ModelError` if logits are NaN or infinitely large; what is masked may be infinitely small."""
    if (logits.isnan() | logits.isposinf()).any():
        dtype = str(model.dtype).removeprefix("torch.")
        raise ModelError(
            f"{describe(model.config).id} computes NaN or infinity in {dtype}: try --dtype float32 or bfloat16; if "
            "that does not help, its weights are damaged"
        )
