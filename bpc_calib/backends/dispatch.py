"""Where a step is computed: by Triton on a GPU, C++ on a CPU, or plain torch. `BPC_BACKEND` names one for all.

Every function here has the signature of its plain torch function and returns what that returns.
"""

import functools
import logging
import os

import torch
from torch import Tensor

from bpc_calib.backends.limits import unfit
from bpc_calib.backends.protocol import Backend, Request
from bpc_calib.errors import InputError
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder
from bpc_calib.method.fitting import Fit
from bpc_calib.method.stepping import Hashed

__all__ = [
    "BACKENDS",
    "append",
    "backend",
    "choose",
    "compiled",
    "dense_attention",
    "encode_with",
    "find",
    "fit",
    "for_pages",
    "lacking",
    "named",
    "sparse_attention",
    "step",
    "workspace",
]

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "triton", "native")
OLDEST_TRITON = (3, 6)


def find(device: torch.device) -> Backend:
    """The backend for tensors on this device; may still not serve every call."""
    return _load(backend(device))


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


def for_pages(query: Tensor, kv_heads: int) -> Backend:
    """The backend that serves decoding steps over pages, for queries like `[1, H, D]`.

    Raises:
        InputError: no kernels serve them on this GPU; a CUDA graph cannot hold a step of plain torch.
    """
    found = _serving(Request(query.unsqueeze(0), torch.Size([1, kv_heads, 1]), query.shape[1] // kv_heads))
    if query.is_cuda and found is _load("torch"):
        raise InputError("BPC's kernels do not serve this model on this GPU: the warning above says why")
    return found


def workspace(device: torch.device, sizes: tuple[int, int, int], choice: Choice, bits: int, sequences: int) -> int:
    """The bytes on a GPU that a step over pages takes beside its result; else 0.

    Args:
        device: of the pages.
        sizes: KV heads, query heads of each, and the most tokens of a sequence.
        choice: the rules.
        bits: of a code.
        sequences: the most in a step.
    """
    if device.type != "cuda":
        return 0
    from bpc_calib.backends.triton import pipeline

    return pipeline.workspace(sizes, choice, bits, sequences)


def choose(
    query: Tensor,
    projection: Tensor,
    cached: Cached,
    k: int | Tensor,
    choice: Choice,
    *,
    width: int | None = None,
) -> Tensor:
    """`bpc_calib.method.choosing.choose`."""
    codes = cached.codes
    request = Request(query, codes.shape[:3], heads=query.shape[-2], contiguous=codes.stride(-1) == 1)
    return _serving(request).choose(query, projection, cached, k, choice, width=width)


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`."""
    request = Request(keys, keys.shape[:3], contiguous=keys.stride(-1) == 1)
    return _serving(request).encode_with(encoder, keys)


def fit(
    keys: Tensor,
    bits: int = 64,
    *,
    iterations: int = 8,
    rounds: int = 0,
    metric: Tensor | None = None,
    mean: Tensor | None = None,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Fit:
    """`bpc_calib.method.fitting.fit`."""
    one = keys[(None,) * max(0, 4 - keys.dim())]
    return _serving(Request(one, one.shape[:3])).fit(
        keys,
        bits,
        iterations=iterations,
        rounds=rounds,
        metric=metric,
        mean=mean,
        weights=weights,
        generator=generator,
    )


def append(encoder: Encoder | None, key: Tensor, value: Tensor, place: Tensor, slots: Slots) -> None:
    """`bpc_calib.method.appending.append`."""
    buffers = (slots.keys, slots.values) if slots.codes is None else (slots.keys, slots.values, slots.codes)
    request = Request(key, slots.keys.shape[:3], contiguous=all(buffer.stride(-1) == 1 for buffer in buffers))
    _serving(request).append(encoder, key, value, place, slots)


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scaling: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention`."""
    return _serving(_attention_request(query, keys, values)).sparse_attention(query, keys, values, indices, scaling)


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scaling: float | None = None,
    *,
    valid: Tensor | None = None,
) -> Tensor:
    """`bpc_calib.method.dense_attention.dense_attention`."""
    serving = _serving(_attention_request(query, keys, values))
    return serving.dense_attention(query, keys, values, lengths, scaling, valid=valid)


def step(query: Tensor, hashed: Hashed, k: int, choice: Choice) -> Tensor:
    """`bpc_calib.method.stepping.step`."""
    return _serving(_attention_request(query, hashed.slots.keys, hashed.slots.values)).step(query, hashed, k, choice)


def _attention_request(query: Tensor, keys: Tensor, values: Tensor) -> Request:
    contiguous = query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    return Request(query, keys.shape[:3], heads=query.shape[-2], contiguous=contiguous)


def _serving(request: Request) -> Backend:
    """The backend of the request's device where it serves the request, else plain torch."""
    device = request.tensor.device
    if torch.compiler.is_compiling() and device.type == "cpu" and named() != "triton":
        return _load("torch")  # the compiler cannot see into what was compiled before
    name = backend(device)
    found = _load(name)
    if (fault := found.serves(request)) is None:
        return found
    _warn_once(f"the {name} kernels do not serve {fault}; plain torch does, slowly")
    return _load("torch")


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
