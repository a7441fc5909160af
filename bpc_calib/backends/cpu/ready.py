"""Compiling the kernels for a dtype before its first step, or loading them."""

import functools
import logging
import time

import torch
from filelock import FileLock

from bpc_calib.backends.cpu.folder import kernel_folder
from bpc_calib.backends.cpu.pipeline import FEW, choose, encode_with, sparse_attention
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import make_encoder

__all__ = ["make_ready"]

logger = logging.getLogger(__name__)


@functools.cache
def make_ready(dtype: torch.dtype) -> None:
    """Compile the kernels for keys of a dtype, or load them, and log how long it took where it takes long."""
    folder, name = kernel_folder(), str(dtype).removeprefix("torch.")
    if folder is None:
        logger.warning(
            "compiling the kernels for %s on the CPU, at every start: no folder could be made for them", name
        )
        return _compile(dtype)
    with FileLock(folder / "lock"):  # two processes would mix up what they keep
        marker = folder / name
        if marker.exists():
            return _compile(dtype)
        logger.warning("compiling the kernels for %s on the CPU, some 20 to 60 s, once on this machine", name)
        began = time.perf_counter()
        _compile(dtype)
        marker.touch()
        logger.warning("compiled in %.1f s", time.perf_counter() - began)


def _compile(dtype: torch.dtype) -> None:
    """Call every kernel once, on next to nothing."""
    query, keys = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 2, 16, dtype=dtype)
    cached = Cached(torch.zeros(1, 1, 2, 1, dtype=torch.int64))
    chosen = choose(query, torch.zeros(1, 32, 16, dtype=dtype), cached, 1, Choice(scaling=1.0))
    sparse_attention(query, keys, keys, chosen)
    encoder = make_encoder(torch.zeros(1, 32, 16), dtype)
    for tokens in (1, FEW + 1):
        encode_with(encoder, torch.zeros(1, 1, tokens, 16, dtype=dtype))
