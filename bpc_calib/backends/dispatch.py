"""Where a step is computed: by Triton on a GPU, numba on a CPU, or plain torch. `BPC_BACKEND` names one for all.

Every function here has the signature of its torch oracle and returns what that returns.
"""

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method import choosing, encoding
from bpc_calib.method.dense_attention import check as check_dense
from bpc_calib.method.dense_attention import dense_attention as plain_dense
from bpc_calib.method.encoding import Encoded, Encoder
from bpc_calib.method.scoring import GROUPS
from bpc_calib.method.sparse_attention import check as check_attention
from bpc_calib.method.sparse_attention import sparse_attention as plain_attention

__all__ = ["BACKENDS", "backend", "choose", "dense_attention", "encode_with", "named", "sparse_attention"]

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "triton", "numba")
OLDEST_TRITON, OLDEST_NUMBA = (3, 6), (0, 61)
OLDEST_GPU = (8, 0)
NO_FLOAT64 = (10, 0)  # from here on Triton's compiler breaks off at products of float64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_HEADS, MOST_DIM, MOST_ROWS, MOST_TOKENS = 16, 256, 65535, 1 << 22


def backend(device: torch.device) -> str:
    """The one of `BACKENDS` that serves tensors of this device.

    Raises:
        InputError: `BPC_BACKEND` names none, or one that cannot run here.
    """
    asked = named()
    if asked == "torch":
        return "torch"
    wanted = asked or {"cuda": "triton", "cpu": "numba"}.get(device.type, "torch")
    missing = None
    if wanted == "triton":
        missing = _without_triton() or _unfit(device)
    elif wanted == "numba":
        missing = _without_numba()
        if missing is None and device.type != "cpu":
            missing = f"needs tensors on the CPU, and they are on {device.type}"
    if missing is None:
        return wanted
    if asked is not None:
        raise InputError(f"BPC_BACKEND={asked}: {missing}")
    _warn_once(f"{missing}; plain torch decodes instead, slowly")
    return "torch"


def named() -> str | None:
    """The backend that `BPC_BACKEND` names; None: none.

    Raises:
        InputError: it names one that there is not.
    """
    asked = os.environ.get("BPC_BACKEND") or None
    if asked not in (None, *BACKENDS):
        raise InputError(f"BPC_BACKEND must be one of {', '.join(BACKENDS)}, not {asked!r}")
    return asked


def choose(
    query: Tensor,
    projection: Tensor,
    codes: Tensor,
    gain: Tensor | None,
    k: int | Tensor,
    *,
    scaling: float,
    group: str = GROUPS[0],
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    worst: Tensor | None = None,
    safeguard: float = 0.0,
    width: int | None = None,
) -> Tensor:
    """`bpc_calib.method.choosing.choose`."""
    rules: dict[str, Any] = {
        "scaling": scaling, "group": group, "valid": valid, "lengths": lengths, "recent": recent, "sink": sink,
        "worst": worst, "safeguard": safeguard,
    }  # fmt: skip
    serves = _serves(query, codes.shape[:3], heads=query.shape[-2], contiguous=codes.stride(-1) == 1)
    if serves == "torch":
        return choosing.choose(query, projection, codes, gain, k, width=width, **rules)
    choosing.check(query, projection, codes, gain, k, group, valid, lengths, recent, sink, worst, safeguard)
    if serves == "numba":
        return _numba(query.dtype).choose(query, projection, codes, gain, k, width=width, **rules)
    one, ks = (0, k) if isinstance(k, Tensor) else (int(k), None)
    if width is None:
        width = one if ks is None else int(ks.max())
    return torch.ops.bpc.choose(query, projection, codes, gain, one, ks, **rules, width=width)


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scale: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention.sparse_attention`."""
    contiguous = query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    serves = _serves(query, keys.shape[:3], heads=query.shape[-2], contiguous=contiguous)
    if serves == "torch":
        return plain_attention(query, keys, values, indices, scale)
    check_attention(query, keys, values, indices)
    if serves == "numba":
        return _numba(query.dtype).sparse_attention(query, keys, values, indices, scale)
    return torch.ops.bpc.sparse_attention(
        query, keys, values, indices, query.shape[-1] ** -0.5 if scale is None else scale
    )


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    *,
    valid: Tensor | None = None,
) -> Tensor:
    """`bpc_calib.method.dense_attention.dense_attention`; padded sequences in plain torch, which waits for nothing."""
    contiguous = query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    serves = (
        "torch" if valid is not None else _serves(query, keys.shape[:3], heads=query.shape[-2], contiguous=contiguous)
    )
    if serves != "triton":  # nothing on a CPU is faster than torch here
        return plain_dense(query, keys, values, lengths, scale, valid=valid)
    check_dense(query, keys, values, lengths, valid)
    return torch.ops.bpc.dense_attention(
        query, keys, values, lengths, query.shape[-1] ** -0.5 if scale is None else scale
    )


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`."""
    serves = _serves(keys, keys.shape[:3], contiguous=keys.stride(-1) == 1)
    if serves == "torch":
        return encoding.encode_with(encoder, keys)
    if serves == "numba":
        return _numba(keys.dtype).encode_with(encoder, keys)
    return Encoded(*torch.ops.bpc.encode(encoder.matrix, encoder.gram, encoder.metric, encoder.mean, keys))


def _serves(given: Tensor, shape: torch.Size, *, contiguous: bool, heads: int = 1) -> str:
    """What takes a query or keys like these, for a cache `[B, H_KV, N]` and `heads` queries a KV head."""
    if torch.compiler.is_compiling() and given.device.type == "cpu" and named() != "triton":
        return "torch"  # the compiler cannot see into what numba compiled
    found = backend(given.device)
    if found == "torch":
        return "torch"
    dim, triton = given.shape[-1], found == "triton"
    float64 = triton and given.dtype == torch.float64 and _capability(given.device) < NO_FLOAT64
    if given.dim() != 4:
        fault = f"{given.dim()} dimensions instead of 4"
    elif given.dtype not in DTYPES and not float64:
        fault = f"dtype {given.dtype}"
    elif heads > MOST_HEADS:
        fault = f"{heads} query heads on a KV head, more than {MOST_HEADS}"
    elif dim > MOST_DIM:
        fault = f"head_dim {dim}, above {MOST_DIM}"
    elif triton and (shape[0] * shape[1] > MOST_ROWS or shape[2] >= MOST_TOKENS):
        fault = f"a cache {list(shape)}, beyond {MOST_ROWS} rows or {MOST_TOKENS} tokens"
    elif not contiguous:
        fault = "a last dimension that is not contiguous"
    else:
        if triton:
            import bpc_calib.backends.triton.ops  # noqa: F401  registers torch.ops.bpc
        return found
    _warn_once(f"the {found} kernels do not serve {fault}; plain torch does, slowly")
    return "torch"


def _numba(dtype: torch.dtype) -> Any:
    """The compiled kernels, ready for keys of this dtype."""
    from bpc_calib.backends.cpu import pipeline

    pipeline.make_ready(dtype)
    return pipeline


@functools.cache
def _without_triton() -> str | None:
    """What is missing for Triton; None: nothing."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed (pip install triton)"
    return _older("Triton", triton.__version__, OLDEST_TRITON)


@functools.cache
def _without_numba() -> str | None:
    """What is missing for numba; None: nothing."""
    try:
        import numba
    except ImportError:
        return "numba is not installed (pip install 'bpc-calib[cpu]')"
    return _older("numba", numba.__version__, OLDEST_NUMBA)


def _older(name: str, found: str, oldest: tuple[int, int]) -> str | None:
    if tuple(map(int, found.split(".")[:2])) >= oldest:
        return None
    return f"{name} {found} is older than {'.'.join(map(str, oldest))}"


def _unfit(device: torch.device) -> str | None:
    """Why compiled kernels cannot run on a device; None: they can, or it interprets them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"needs a GPU, and the tensors are on {device.type}"
    if (capability := _capability(device)) < OLDEST_GPU:
        return f"the kernels need a GPU of compute capability 8.0, and this one has {'.'.join(map(str, capability))}"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    """NVIDIA's compute capability; elsewhere one that is served."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return OLDEST_GPU
    return torch.cuda.get_device_capability(device)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
