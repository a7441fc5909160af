"""Compiling the kernels for a dtype before their first call, or loading them."""

import functools
import logging
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL

import torch
from filelock import FileLock

from bpc_calib.backends.cpu.at_once import step
from bpc_calib.backends.cpu.compiling import kernel_folder
from bpc_calib.backends.cpu.over_pages import attend_pages, hash_into
from bpc_calib.backends.cpu.pipeline import FEW, choose, encode_with, sparse_attention
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.paging import CodePages, Fresh, Packing, Paged, Rows
from bpc_calib.method.stepping import Hashed

__all__ = ["DECODING", "GROUPS", "begin", "make_ready"]

logger = logging.getLogger(__name__)

PROGRESS = {"progress": True}  # a message that a user who waits should see, and no fault


CHILD = """
import sys, torch
from bpc_calib.backends.cpu.ready import make_ready
make_ready(getattr(torch, sys.argv[1]), sys.argv[2])
"""


def begin(dtype: torch.dtype, *groups: str) -> list[subprocess.Popen[bytes]]:
    """Start compiling groups of kernels (`GROUPS`), each in a process of its own, where they are not kept yet."""
    folder = kernel_folder()
    if folder is None:
        return []
    return [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, _name(dtype), group], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
        )
        for group in groups
        if not _marker(folder, dtype, group).exists()
    ]


@functools.cache
def make_ready(dtype: torch.dtype, *groups: str) -> None:
    """Compile groups of kernels (`GROUPS`) for keys of a dtype, or load them; log how long that took if it takes long.

    Several groups are compiled side by side: the first here, the others in processes.
    """
    folder = kernel_folder()
    if folder is None:
        logger.warning("compiling kernels for %s on the CPU at every start: no folder can keep them", _name(dtype))
        for group in groups:
            GROUPS[group](dtype)
        return
    began, missing = time.perf_counter(), [each for each in groups if not _marker(folder, dtype, each).exists()]
    if missing:
        logger.warning(
            "compiling kernels for %s on the CPU, half a minute to two, once on this machine",
            _name(dtype),
            extra=PROGRESS,
        )
        others = begin(dtype, *missing[1:])
        _compile(folder, dtype, missing[0])
        for other in others:
            other.wait()
    for group in groups:  # loads them, and compiles what failed in a process
        _compile(folder, dtype, group)
    if missing:
        logger.warning("compiled in %.1f s", time.perf_counter() - began, extra=PROGRESS)


def _compile(folder: Path, dtype: torch.dtype, group: str) -> None:
    with FileLock(folder / f"{group}.lock"):  # two processes would mix up what they keep
        GROUPS[group](dtype)
        _marker(folder, dtype, group).touch()


def _marker(folder: Path, dtype: torch.dtype, group: str) -> Path:
    """The file that shows that a group is kept for a dtype."""
    return folder / f"{group}-{_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pages(dtype: torch.dtype) -> None:
    make_ready(dtype, "hash")  # many tokens are hashed by its kernels
    query, projection = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 32, 16, dtype=dtype)
    pages = CodePages(torch.zeros(1, 1, 16, 1, dtype=torch.int64), torch.zeros(1, 1, 16, dtype=torch.uint8))
    encoder = make_encoder(torch.zeros(1, 32, 16), dtype)
    for tokens in (1, 16):
        hash_into(Fresh(encoder, torch.zeros(1, 1, tokens, 16, dtype=dtype), torch.arange(tokens)), pages)
    where, table = torch.arange(256).view(16, 16), torch.zeros(1, 1, dtype=torch.int32)
    paged = Paged(pages, torch.zeros(1, 1, 512, dtype=dtype), Packing(where, where + 256))
    attend_pages(query, projection, paged, Rows(table, torch.tensor([2]), torch.tensor([1]), 1), Choice(scaling=1.0))


def _hash(dtype: torch.dtype) -> None:
    encoder = make_encoder(torch.zeros(1, 32, 16), dtype)
    for tokens in (1, FEW + 1):
        encode_with(encoder, torch.zeros(1, 1, tokens, 16, dtype=dtype))


def _choose(dtype: torch.dtype) -> None:
    cached = Cached(torch.zeros(1, 1, 2, 1, dtype=torch.int64))
    choose(torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 32, 16, dtype=dtype), cached, 1, Choice(scaling=1.0))


def _attend(dtype: torch.dtype) -> None:
    keys = torch.zeros(1, 1, 2, 16, dtype=dtype)
    sparse_attention(keys[:, :, :1], keys, keys, torch.zeros(1, 1, 1, dtype=torch.int64))


def _step(dtype: torch.dtype) -> None:
    query, keys = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 2, 16, dtype=dtype)
    slots = Slots(keys, keys, torch.zeros(1, 1, 2, 1, dtype=torch.int64))
    encoder = make_encoder(torch.zeros(1, 32, 16), dtype)
    step(query, Hashed(torch.zeros(1, 32, 16, dtype=dtype), encoder, slots, 2), 1, Choice(scaling=1.0))


# Each calls its kernels once, on next to nothing. No kernel is in two groups, so processes compile them side by side.
GROUPS = {"choose": _choose, "step": _step, "hash": _hash, "attend": _attend, "pages": _pages}
DECODING = ("choose", "step", "hash", "attend")  # what a cache may call
