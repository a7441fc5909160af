"""Compiling the kernels for a dtype before its first step, or loading them."""

import functools
import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from filelock import FileLock

from bpc_calib.backends.cpu.at_once import step
from bpc_calib.backends.cpu.decompose import WORD, decompose_kernel
from bpc_calib.backends.cpu.folder import kernel_folder
from bpc_calib.backends.cpu.language import WIDE
from bpc_calib.backends.cpu.layout import LIKE
from bpc_calib.backends.cpu.least_squares import norm_kernel, products_kernel
from bpc_calib.backends.cpu.over_pages import attend_pages, hash_into
from bpc_calib.backends.cpu.pipeline import FEW, choose, encode_with, sparse_attention
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.paging import CodePages, Fresh, Packing, Paged, Rows
from bpc_calib.method.stepping import Hashed

__all__ = ["make_fitting_ready", "make_pages_ready", "make_ready"]

logger = logging.getLogger(__name__)


@functools.cache
def make_ready(dtype: torch.dtype) -> None:
    """Compile the kernels of a decoding step for keys of a dtype, or load them."""
    _once(f"the kernels for {_name(dtype)}", "some 20 to 60 s", _name(dtype), lambda: _decode(dtype))


@functools.cache
def make_fitting_ready(dtype: torch.dtype) -> None:
    """Compile the kernels that fit projections to keys of a dtype, or load them."""
    what = f"the kernels that fit projections to {_name(dtype)}"
    _once(what, "some 10 to 30 s", f"{_name(dtype)}-fitting", lambda: _fit(dtype))


@functools.cache
def make_pages_ready(dtype: torch.dtype) -> None:
    """Compile the kernels of a server's decoding step for keys of a dtype, or load them."""
    _once(
        f"the kernels over pages for {_name(dtype)}", "some 20 to 60 s", f"{_name(dtype)}-pages", lambda: _pages(dtype)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _once(what: str, duration: str, name: str, compile_all: Callable[[], None]) -> None:
    """Compile or load, and log how long it took where it takes long; `name` is that of a marker file."""
    folder = kernel_folder()
    if folder is None:
        logger.warning("compiling %s on the CPU, at every start: no folder could be made for them", what)
        return compile_all()
    with FileLock(folder / "lock"):  # two processes would mix up what they keep
        marker = folder / name
        if marker.exists():
            return compile_all()
        logger.warning("compiling %s on the CPU, %s, once on this machine", what, duration)
        began = time.perf_counter()
        compile_all()
        marker.touch()
        logger.warning("compiled in %.1f s", time.perf_counter() - began)


def _fit(dtype: torch.dtype) -> None:
    """Call every kernel of `fitting` once."""
    like, keys = np.empty(0, LIKE[dtype]), torch.zeros(WORD, WIDE, dtype=dtype)
    mean, square, wide = np.zeros(WIDE), np.eye(WIDE), np.zeros((32, WIDE))
    arguments = (like, keys.data_ptr(), 1, mean)
    norm_kernel(*arguments, square)
    decompose_kernel(*arguments, square, wide, 1, np.zeros_like(wide))
    products_kernel(*arguments, np.zeros((WIDE, 32)), np.zeros((32, 32)), np.zeros((32, 32)), wide)


def _pages(dtype: torch.dtype) -> None:
    """Call every kernel over pages once."""
    query, projection = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 32, 16, dtype=dtype)
    pages = CodePages(torch.zeros(1, 1, 16, 1, dtype=torch.int64), torch.zeros(1, 1, 16, dtype=torch.uint8))
    encoder = make_encoder(torch.zeros(1, 32, 16), dtype)
    for tokens in (1, 16):
        hash_into(Fresh(encoder, torch.zeros(1, 1, tokens, 16, dtype=dtype), torch.arange(tokens)), pages)
    where, table = torch.arange(256).view(16, 16), torch.zeros(1, 1, dtype=torch.int32)
    paged = Paged(pages, torch.zeros(1, 1, 512, dtype=dtype), Packing(where, where + 256))
    attend_pages(query, projection, paged, Rows(table, torch.tensor([2]), torch.tensor([1]), 1), Choice(scaling=1.0))


def _decode(dtype: torch.dtype) -> None:
    """Call every kernel of a step once, on next to nothing."""
    query, keys = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 2, 16, dtype=dtype)
    cached = Cached(torch.zeros(1, 1, 2, 1, dtype=torch.int64))
    chosen = choose(query, torch.zeros(1, 32, 16, dtype=dtype), cached, 1, Choice(scaling=1.0))
    sparse_attention(query, keys, keys, chosen)
    encoder = make_encoder(torch.zeros(1, 32, 16), dtype)
    for tokens in (1, FEW + 1):
        encode_with(encoder, torch.zeros(1, 1, tokens, 16, dtype=dtype))
    hashed = Hashed(torch.zeros(1, 32, 16, dtype=dtype), encoder, Slots(keys, keys, cached.codes), 2)
    step(query, hashed, 1, Choice(scaling=1.0))
