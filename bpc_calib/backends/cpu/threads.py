"""As many threads as torch has, one kernel at a time, and the memory that kernels share."""

import functools
import itertools
import threading
from typing import Any

import numba
import torch

from bpc_calib.backends.pages import in_huge_pages
from bpc_calib.compat import set_torch_threads

__all__ = ["one_at_a_time", "parts", "run", "scratch", "set_threads"]

LEAST_KEYS = 4096  # keys that are worth a thread

one_at_a_time = threading.Lock()  # not every threading layer of numba can be entered twice
_set = threading.local()
_memory = torch.empty(0, dtype=torch.uint8)  # for the thread that holds the lock


@functools.cache
def _start_threads() -> None:
    """Have numba start its threads, which makes torch, too, use the whole machine: put that back."""
    before = torch.get_num_threads()
    numba.set_num_threads(1)
    set_torch_threads(before)


def set_threads(most: int | None = None) -> None:
    """Have numba use as many threads as torch, and at most so many."""
    _start_threads()
    wanted = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, most or numba.config.NUMBA_NUM_THREADS)
    if getattr(_set, "threads", None) != wanted:  # numba's number is one per thread of Python
        numba.set_num_threads(wanted)
        _set.threads = wanted


def run(kernel: Any, *arguments: Any) -> Any:
    """What a kernel returns that needs no scratch memory."""
    with one_at_a_time:
        set_threads()
        return kernel(*arguments)


def scratch(*sizes: int) -> list[int]:
    """Addresses of so many bytes each, at multiples of 64: fresh memory would cost more than what is done in it."""
    global _memory
    ends = list(itertools.accumulate(-(-size // 64) * 64 + 64 for size in sizes))
    if len(_memory) < ends[-1] + 64:
        _memory = in_huge_pages(torch.empty(ends[-1] + ends[-1] // 16 + 64, dtype=torch.uint8))
    first = -(-_memory.data_ptr() // 64) * 64
    return [first + begin for begin in (0, *ends[:-1])]


def parts(rows: int, length: int, least: int = LEAST_KEYS) -> int:
    """In how many parts each row is cut so that every thread has its own, of at least `least` keys each."""
    threads = torch.get_num_threads()
    return 1 if rows >= 2 * threads else max(1, min(-(-2 * threads // rows), length // least))
