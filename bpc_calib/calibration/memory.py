"""Say in one line what to do when the memory is too small."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bpc_calib.errors import ModelError

__all__ = ["memory_advice"]


@contextmanager
def memory_advice(message: str) -> Iterator[None]:
    """Raise `ModelError` with a message in place of each of the ways in which torch says that memory is lacking."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as fault:
        raise ModelError(message) from fault
    except RuntimeError as fault:
        if "can't allocate memory" not in str(fault):  # the CPU has no exception of its own
            raise
        raise ModelError(message) from fault
