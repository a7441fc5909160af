"""A whole step of a layer as one kernel: the new key hashed, the tokens chosen, and attention over them.

It runs on the thread that calls it. Where a step takes only some 100 us, other threads cost more than they save: those
of torch, which still wait actively for its next operation, hold the cores that numba's threads need.
"""

import numpy as np

from bpc_calib.backends.cpu.attend import Attention, attend_part, put_together
from bpc_calib.backends.cpu.choose import choose_rows
from bpc_calib.backends.cpu.compiling import compiled
from bpc_calib.backends.cpu.encode import Hashing, hash_row
from bpc_calib.backends.cpu.step import Step

__all__ = ["step_kernel"]


@compiled
def step_kernel(like, hashing, choosing, attending):
    """`hash_kernel`, `choose_kernel` and `attend_kernel` in turn, on plain tuples, with one slot and one part."""
    hashed, step, call = Hashing(*hashing), Step(*choosing), Attention(*attending)
    for row in range(hashed.rows):
        hash_row(np.int64(row), like, hashed)
    choose_rows(np.int64(0), np.int64(step.rows), np.int64(0), step)
    for row in range(call.rows):
        attend_part(np.int64(row), like, call)
        put_together(np.int64(row), call)
