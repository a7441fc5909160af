"""A stand-in for the CUDA driver: Triton specialises and compiles as for a GPU, and launches go to a function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

__all__ = ["SHARED", "Launch", "install"]

# Shared memory that a block may ask for, in bytes, by compute capability: CUDA C++ Programming Guide, table of
# technical specifications, less the 1 KB that the system keeps in each block.
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


class Launch(NamedTuple):
    """What a launch passes on."""

    kernel: CompiledKernel  # with `asm`, `metadata` and `src`
    grid: tuple[int, int, int]
    arguments: list[Any]  # of the compiled function, in order: tensors and numbers


class _Utilities:
    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED[self.arch], "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32,
        }  # fmt: skip

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, threads: as if it were loaded."""
        return 1, 1, 32, 0, 1024


class _Driver:
    def __init__(self, arch: int) -> None:
        self.arch, self.utils = arch, _Utilities(arch)

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        return None

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def install(arch: int, launch: Callable[[Launch], None]) -> None:
    """Compile kernels for compute capability `arch` (90 is 9.0) from now on, and call `launch` in place of a GPU.

    Tensors are those of the CPU. Needs `TRITON_INTERPRET=0` before the kernels are imported.
    """
    driver.set_active(_Driver(arch))

    def run(kernel: CompiledKernel) -> Callable[..., None]:
        kernel._init_handles()  # raises where shared memory is out of the GPU's limit

        def to(x: int, y: int, z: int, *rest: Any) -> None:
            # stream, function, two metadata and two hooks; then the arguments, constants among them
            launch(Launch(kernel, (x, y, z), _passed(kernel.src.signature.values(), rest[6:])))

        return to

    CompiledKernel.run = property(run)


def _passed(kinds: Any, values: Any) -> list[Any]:
    """The arguments that are not compiled in; tuples are passed as their parts."""
    passed: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            passed += _passed(kind, value)
        elif kind != "constexpr":
            passed.append(value)
    return passed
