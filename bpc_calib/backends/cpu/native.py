"""The compiled kernels, and the record of a call that they read."""

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bpc_calib.errors import InputError, first_line

__all__ = [
    "ATTEND", "ELEMENTS", "HASH", "PROJECT", "SCORE", "SELECT", "Call", "address", "isa", "library", "run",
]  # fmt: skip

HASH, PROJECT, SCORE, SELECT, ATTEND = 1, 2, 4, 8, 16  # stages of a call
ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MOST_THREADS = 256
INSTRUCTIONS = ("amx", "zen4", "avx512", "avx2", "base")  # what BPC_ISA may name


@functools.cache
def library() -> Any:
    """The library, with the types of its functions.

    Raises:
        ImportError: It has not been built, or not for this machine; so does the import of this module.
        InputError: the environment variable `BPC_ISA` does not name instructions.
    """
    if (wanted := os.environ.get("BPC_ISA")) and wanted not in INSTRUCTIONS:
        raise InputError(f"the environment variable BPC_ISA must be one of {', '.join(INSTRUCTIONS)}, not {wanted!r}")
    path, number, pointer = Path(__file__).with_name("libbpc_cpu.so"), ctypes.c_int64, ctypes.c_void_p
    if not path.exists():
        raise ImportError("the kernels for CPUs are not built (install a C++ compiler, then bpc-calib again)")
    try:
        lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # compiled layers call `bpc_linear`
        lib.bpc_fields.restype = lib.bpc_isa.restype = ctypes.c_char_p
        lib.bpc_squared_norm.restype = ctypes.c_double
        lib.bpc_step.argtypes, lib.bpc_step.restype = [pointer], number
        lib.bpc_greedy.argtypes = [number, *[pointer] * 3, *[number] * 3, *[pointer] * 3]
        lib.bpc_search.argtypes = [number, *[pointer] * 4, *[number] * 4, *[pointer] * 3]
        lib.bpc_squared_norm.argtypes = [number, pointer, number, number, pointer, pointer]
        lib.bpc_decompose.argtypes = [number, pointer, number, number, *[pointer] * 3, number, number, pointer]
        lib.bpc_products.argtypes = [number, pointer, number, number, *[pointer] * 3, number, pointer, pointer]
        lib.bpc_linear.argtypes = [number, number, pointer, number, pointer, number, number, pointer]
    except (OSError, AttributeError) as fault:  # for another machine, or of older sources
        raise ImportError(f"the kernels for CPUs cannot be loaded: {first_line(fault)}") from fault
    with contextlib.suppress(AttributeError):  # a torch without OpenMP
        lib.bpc_share_threads(pointer.from_buffer(ctypes.CDLL(None).GOMP_parallel))
    return lib


class Call(ctypes.Structure):
    """The fields of `native/call.h`, by their names; those that are not given are 0."""

    _fields_ = [(name, ctypes.c_int64) for name in library().bpc_fields().decode().split()] + [
        ("scaling", ctypes.c_double)
    ]


def run(call: Call) -> bool:
    """Run the stages of a call; whether an index was beyond the tokens there are."""
    call.threads = min(torch.get_num_threads(), MOST_THREADS)
    return bool(library().bpc_step(ctypes.byref(call)))


def isa() -> str:
    """The instruction set that serves on this machine, one of `INSTRUCTIONS`."""
    return str(library().bpc_isa().decode())


def address(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0 stands for one that is not given."""
    return 0 if tensor is None else tensor.data_ptr()
