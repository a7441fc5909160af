"""Where a step is computed: by Triton on a GPU, C++ on a CPU, or plain torch. `BPC_BACKEND` names one for all.

`find` picks a module with eight functions (`Backend`); callers call those.
"""

import functools
import logging
import os

import torch
from torch import Tensor

from bpc_calib.backends.limits import unfit
from bpc_calib.backends.protocol import Backend
from bpc_calib.errors import InputError
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import State

__all__ = ["BACKENDS", "backend", "compiled", "find", "lacking", "named", "workspace"]

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "triton", "native")
OLDEST_TRITON = (3, 6)


def find(tensor: Tensor, state: State | None = None) -> Backend:
    """The backend that serves a call: that of the device, or plain torch where that cannot, which a warning says once.

    Args:
        tensor: with a state the queries `[B, H_KV, G, D]`, else the keys to hash or to fit to, `[B, H_KV, N, D]`.
        state: what the layer cached.

    Raises:
        InputError: `BPC_BACKEND` names no backend, or one that cannot run here.
    """
    device = tensor.device
    if torch.compiler.is_compiling() and device.type == "cpu" and named() != "triton":
        return _load("torch")  # the compiler cannot see into what was compiled before
    name = backend(device)
    found = _load(name)
    if (fault := found.serves(tensor, state)) is None:
        return found
    _warn_once(f"the {name} kernels do not serve {fault}; plain torch does, slowly")
    return _load("torch")


def backend(device: torch.device) -> str:
    """The name in `BACKENDS` of the backend for tensors on this device.

    Raises:
        InputError: `BPC_BACKEND` names no backend, or one that cannot run here.
    """
    given = named()
    if given == "torch":
        return "torch"
    wanted = given or compiled(device)
    missing = lacking(wanted, device)
    if missing is None:
        return wanted
    if given is not None:
        raise InputError(f"BPC_BACKEND={given}: {missing}")
    _warn_once(f"{missing}; plain torch decodes instead, slowly")
    return "torch"


def compiled(device: torch.device) -> str:
    """The name of the backend that is compiled for a kind of devices; "torch" where there is none."""
    return {"cuda": "triton", "cpu": "native"}.get(device.type, "torch")


def lacking(name: str, device: torch.device) -> str | None:
    """What a backend lacks to run on a device, and how to get it, if that helps; None: nothing."""
    if name == "triton":
        return _without_triton() or unfit(device)
    if name == "native" and device.type != "cpu":
        return f"needs tensors on the CPU, and they are on {device.type}"
    if name == "native":
        return _without_library()
    return None


def named() -> str | None:
    """The backend that `BPC_BACKEND` names; None if it is not set.

    Raises:
        InputError: it names no backend.
    """
    given = os.environ.get("BPC_BACKEND") or None
    if given not in (None, *BACKENDS):
        raise InputError(f"BPC_BACKEND must be one of {', '.join(BACKENDS)}, not {given!r}")
    return given


def workspace(device: torch.device, sizes: tuple[int, int, int], rules: Rules, sequences: int) -> int:
    """The bytes on a GPU that a sparse step takes beside its result; else 0.

    Args:
        device: of the cache.
        sizes: KV heads, query heads of each, and the most tokens of a sequence.
        rules: of the step.
        sequences: the most in a step.
    """
    if device.type != "cuda":
        return 0
    from bpc_calib.backends.triton import pipeline

    return pipeline.workspace(sizes, rules, sequences)


@functools.cache
def _load(name: str) -> Backend:
    # By import statements, here and below: torch.compile cannot trace `importlib`.
    if name == "triton":
        from bpc_calib.backends.triton import backend as in_triton

        return in_triton
    if name == "native":
        from bpc_calib.backends.cpu import backend as on_cpu

        return on_cpu
    from bpc_calib.backends import plain

    return plain


@functools.cache
def _without_triton() -> str | None:
    """What about Triton is missing; None: nothing."""
    try:
        from triton import __version__ as found
    except ImportError:
        return "Triton is not installed (pip install triton)"
    # As numbers: torch.compile cannot trace `packaging.version` with torch 2.8.
    if tuple(map(int, found.split(".")[:2])) >= OLDEST_TRITON:
        return None
    return f"Triton {found} is older than {'.'.join(map(str, OLDEST_TRITON))}"


@functools.cache
def _without_library() -> str | None:
    """Why the library of the kernels for a CPU cannot be used; None: it can."""
    try:
        from bpc_calib.backends.cpu import native  # noqa: F401
    except ImportError as fault:
        return str(fault)
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
