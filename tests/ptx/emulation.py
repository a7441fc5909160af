"""Runs every kernel that is launched in the emulator, on tensors of the CPU, and raises what is wrong as `Fault`."""

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ptx.block import Block, Compiled
from ptx.driver import Launch, install
from ptx.memory import Clock, Global, Segment, Shared

__all__ = ["ORDERS", "Emulation", "emulate"]

ORDERS = ("random", "reversed", "ascending")
NOBODY = -77  # what lies in integers that nobody wrote; in floats it is NaN


class Emulation:
    """Launches, and what they share: compiled programs and the bytes that somebody wrote of each empty tensor."""

    def __init__(self, order: str = "random", seed: int = 0) -> None:
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
        self.order, self.seed, self.launches = order, seed, 0
        self.clock = Clock()
        self.compiled: dict[str, Compiled] = {}
        # By address. The tensors are kept, so that no other one gets their memory while it is watched.
        self.watched: dict[int, tuple[torch.Tensor, int, Any]] = {}

    def empty(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`torch.empty` or the like, whose tensors are filled with what no kernel should read."""

        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            tensor = make(*arguments, **options)
            if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or not tensor.numel():
                return tensor
            if tensor.dtype.is_floating_point:
                tensor.fill_(float("nan"))
            elif tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
                tensor.fill_(NOBODY)
            elif tensor.dtype == torch.uint8:
                tensor.fill_(NOBODY & 255)
            storage = tensor.untyped_storage()
            self.watched[storage.data_ptr()] = tensor, tensor._version, np.zeros(storage.nbytes(), np.uint8)
            return tensor

        return made

    def written(self, tensor: torch.Tensor) -> Any:
        """Of each byte of its storage 255 if somebody wrote it, or None where everything is written."""
        found = self.watched.get(tensor.untyped_storage().data_ptr())
        # Torch wrote to it: all is written, as far as we know.
        return None if found is None or found[0]._version != found[1] else found[2]

    def launch(self, launch: Launch) -> None:
        kernel = launch.kernel
        if kernel.hash not in self.compiled:
            self.compiled[kernel.hash] = Compiled(kernel.asm["ptx"])
        self.run(self.compiled[kernel.hash], launch.grid, launch.arguments, kernel.metadata.shared)

    def run(self, compiled: Compiled, grid: tuple[int, int, int], arguments: list[Any], shared: int) -> None:
        """Every block of a launch, with tensors and numbers as arguments and `shared` bytes of shared memory."""
        clock, grain, kinds = self.clock, compiled.grain, compiled.program.parameters
        clock.begin_launch(compiled.operands.warp)
        segments: dict[int, Segment] = {}
        for tensor in (each for each in arguments if isinstance(each, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                name = f"a tensor {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
                data = np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)
                segments[storage.data_ptr()] = Segment(data, name, clock, grain, self.written(tensor))
        values = [
            _parameter(each, kind) for each, (kind, _) in zip(arguments + [0] * len(kinds), kinds, strict=False)
        ]  # fmt: skip
        block = Block(compiled, Global(segments, clock), Shared(shared, clock, grain), clock, values, self.seed)
        blocks = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        self.launches += 1
        if self.order == "random":
            random.Random(self.seed + self.launches).shuffle(blocks)
        elif self.order == "reversed":
            blocks.reverse()
        with np.errstate(all="ignore"):
            for index in blocks:
                block.run(index, grid)


def _parameter(value: Any, kind: str) -> Any:
    """The bits of an argument, [1]."""
    if isinstance(value, torch.Tensor):
        return np.array([value.data_ptr()], np.uint64)
    if kind == "f64":
        return np.array([value], np.float64).view(np.uint64)
    if isinstance(value, float):  # Triton passes the bits of float32
        return np.array([value], np.float32).view(np.uint32)
    return np.array([int(value) & 2**64 - 1], np.uint64)


def emulate(arch: int, order: str = "random", seed: int = 0) -> Emulation:
    """From now on, kernels are compiled for compute capability `arch` (90 is 9.0) and run here."""
    emulation = Emulation(order, seed)
    install(arch, emulation.launch)
    torch.empty = emulation.empty(torch.empty)
    torch.empty_like = emulation.empty(torch.empty_like)
    torch.Tensor.new_empty = emulation.empty(torch.Tensor.new_empty)
    return emulation
