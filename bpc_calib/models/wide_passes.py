"""Passes in float32 of a model whose weights have 16 bits: the smallest change of an input shows in the output.

In bfloat16, any change at all moves every later rounding, and the next token's distribution by a KL of about 0.002.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["WidePasses", "widened"]


class WidePasses(TorchFunctionMode):
    """Inside this block, 16-bit tensors that meet float32 ones are widened, and so are weights, when they are used.

    A pass is in float32 if its input is, as `inputs_embeds`. The memory grows by one weight.
    """

    def __torch_function__(
        self, function: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        values = (*given, *named.values())
        if _has(values, torch.float32) and not getattr(function, "__name__", "_").endswith("_"):
            given, named = tuple(map(widened, given)), {name: widened(each) for name, each in named.items()}
        return function(*given, **named)


def _has(values: tuple[Any, ...], dtype: torch.dtype) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == dtype for each in values)


def widened(value: Any) -> Any:
    """Return a tensor of 16-bit numbers in float32, and any other value as it is."""
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value
