"""Long passes of a model in 16-bit numbers, in float32 where the processor lacks products of 16-bit numbers."""

import functools
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from bpc_calib.compat import set_torch_threads
from bpc_calib.models.wide_passes import widened

__all__ = ["LONG", "slow_products", "widen_long_passes"]

LONG = 32  # tokens of a pass from which products in float32 save more than reading the weights anew costs
SLOWER = 1.5  # times as long as in float32, from which products count as slow: those measured take 0.2 to 1 or 2 to 8
# By name, since not every version of torch has the product of experts, `grouped_mm`.
PRODUCTS = {"linear", "scaled_dot_product_attention", "matmul", "__matmul__", "bmm", "_grouped_mm"}
SIZE, REPEATS = 512, 9


@functools.cache
def slow_products(dtype: torch.dtype) -> float | None:
    """Return how many times longer than in float32 a product in a 16-bit dtype takes on this CPU; None: it is not slow.

    Measured once per process, in some milliseconds: a processor without such products (AMX, AVX512-BF16, Arm's BF16)
    takes 2 to 8 times as long. One thread's own time is taken, so that other programs, which delay it and keep threads
    waiting for each other, do not change what a calibration computes.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    wide = torch.ones(SIZE, SIZE)
    narrow = wide.to(dtype)
    threads = torch.get_num_threads()
    set_torch_threads(1)
    try:
        taken = [[_seconds(each) for each in (wide, narrow)] for _ in range(REPEATS)]
    finally:
        set_torch_threads(threads)
    ratio = min(narrow for _, narrow in taken) / min(wide for wide, _ in taken)
    return ratio if ratio > SLOWER else None


def _seconds(matrix: Tensor) -> float:
    """Return the seconds of the product of a matrix with itself, as this thread computes it."""
    began = time.thread_time()
    linear(matrix, matrix)
    return time.thread_time() - began


def widen_long_passes(model: Any) -> None:
    """Have a model compute the products of long passes in float32; its weights and results keep their dtype.

    Each weight is widened when it is used, so the memory grows by one weight. Steps of a few tokens stay as they are:
    they wait for the weights, which 16 bits halve.
    """
    for module in (model.base_model, model.get_output_embeddings()):
        if module is not None:
            passes = _Passes()
            module.register_forward_pre_hook(passes.begin, with_kwargs=True)
            module.register_forward_hook(passes.end, always_call=True)


class _Passes:
    """The hooks of one module: a block of wide products around each long pass."""

    def __init__(self) -> None:
        self.open: list[ExitStack] = []

    def begin(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        stack = ExitStack()
        tokens = [*given, named.get("input_ids"), named.get("inputs_embeds")]
        if any(isinstance(each, Tensor) and each.shape[:2].numel() >= LONG for each in tokens):
            stack.enter_context(_WideProducts())
        self.open.append(stack)

    def end(self, *_: Any) -> None:
        self.open.pop().close()


class _WideProducts(TorchFunctionMode):
    """Inside this block, products of 16-bit tensors on a CPU are computed in float32 and rounded once."""

    def __torch_function__(
        self, function: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if getattr(function, "__name__", None) in PRODUCTS and given and (narrow := _narrow(given[0])) is not None:
            found = function(*map(widened, given), **{name: widened(each) for name, each in named.items()})
            return found.to(narrow)
        return function(*given, **named)


def _narrow(value: Any) -> torch.dtype | None:
    """Return the dtype of a tensor of 16-bit numbers on the CPU, else None."""
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype in (torch.bfloat16, torch.float16):
        return value.dtype
    return None
