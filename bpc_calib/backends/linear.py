"""Linear layers of a few tokens on a CPU, by a kernel where torch reads their weights far below the memory's speed."""

import torch
from torch import Tensor

from bpc_calib import compat
from bpc_calib.backends import dispatch
from bpc_calib.errors import InputError

__all__ = ["MOST", "faster_than_torch", "linear", "slow_in_torch"]

MOST = 31  # tokens; of more, torch reads the weights fast enough, or `widen_long_passes` helps it
UNIT = 32  # numbers: the kernel needs rows of a multiple
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def faster_than_torch() -> bool:
    """Whether `linear` takes less time than torch on this processor.

    On x86 processors torch calls oneDNN or MKL, or computes 16-bit tokens one after the other (docs/performance.md).
    Kernels made by a compiler that does not know AMX are no match for it.
    """
    if not compat.is_x86() or dispatch.backend(torch.device("cpu")) != "native":
        return False
    from bpc_calib.backends.cpu.native import isa

    return not compat.has_amx() or isa() == "amx"


def slow_in_torch(weight: Tensor) -> bool:
    """Whether `linear` serves this weight `[outputs, columns]` and is faster than torch for up to `MOST` tokens."""
    served = weight.dtype in DTYPES and weight.shape[1] % UNIT == 0 and weight.is_contiguous()
    return served and weight.device.type == "cpu" and faster_than_torch()


def linear(tokens: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.linear(tokens.float(), weight.float())`, with sums in another order.

    Args:
        tokens: `[T, columns]`, of the weight's dtype.
        weight: `[outputs, columns]`, `slow_in_torch`.

    Returns:
        float32 `[T, outputs]`.

    Raises:
        InputError: the tokens do not fit the weight.
    """
    from bpc_calib.backends.cpu.native import ELEMENTS, library

    (count, columns), outputs = tokens.shape, len(weight)
    if weight.shape[1] != columns or weight.dtype != tokens.dtype:
        raise InputError(
            f"tokens {list(tokens.shape)} of {tokens.dtype} do not fit weights {list(weight.shape)} of {weight.dtype}"
        )
    tokens, found = tokens.contiguous(), tokens.new_empty(count, outputs, dtype=torch.float32)
    library().bpc_linear(
        torch.get_num_threads(), ELEMENTS[weight.dtype], tokens.data_ptr(), count,
        weight.data_ptr(), outputs, columns, found.data_ptr(),
    )  # fmt: skip
    return found
