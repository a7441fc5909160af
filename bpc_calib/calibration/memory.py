"""Say in one line what to do when the memory is too small."""

from collections.abc import Iterator
from contextlib import contextmanager

from bpc_calib.errors import ModelError, is_out_of_memory

__all__ = ["memory_advice"]


@contextmanager
def memory_advice(message: str) -> Iterator[None]:
    """Raise `ModelError` with a message in place of each of the ways in which torch says that memory is lacking."""
    try:
        yield
    except Exception as fault:
        if not is_out_of_memory(fault):
            raise
        raise ModelError(message) from fault
