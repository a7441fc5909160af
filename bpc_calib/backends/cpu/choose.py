"""A step up to the tokens chosen, as one kernel: a thread takes a row from its query to its list while it is cached.

Where there are fewer rows than would keep all threads busy, a row is scored in parts, and all wait for each other
between the stages.
"""

import numba
import numpy as np

from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.prep import prep_row
from bpc_calib.backends.cpu.score import score_part
from bpc_calib.backends.cpu.step import Step
from bpc_calib.backends.cpu.take import candidates_of_part, mark_row, take_row

__all__ = ["PROJECT", "SCORE", "SELECT", "choose_kernel", "choose_row", "rows_in_turn"]

PROJECT, SCORE, SELECT = 1, 2, 3  # the stages, each with those before it


@inlined
def choose_row(row, slot, like, step):
    """All stages of a row in one part."""
    prep_row(row, like, step)
    if step.last_stage < SCORE:
        return
    score_part(row, slot, step)
    mark_row(row, slot, step)
    candidates_of_part(row, slot, step)
    if step.last_stage < SELECT:
        return
    take_row(row, slot, step)


@inlined
def rows_in_turn(slot, like, step):
    """All rows of one slot."""
    for row in range(slot * step.rows // step.slots, (slot + 1) * step.rows // step.slots):
        choose_row(row, slot, like, step)


@compiled(parallel=True)
def choose_kernel(like, fields):
    """The stages of a `Step`, given as a plain tuple: numba unboxes a named one ten times as slowly.

    Rows in one part take turns in the slots; rows in several parts have a slot each.
    """
    step = Step(*fields)
    if step.parts == 1:
        for index in numba.prange(step.slots):
            rows_in_turn(np.int64(index), like, step)
        return
    for index in numba.prange(step.rows):
        prep_row(np.int64(index), like, step)
    if step.last_stage < SCORE:
        return
    for index in numba.prange(step.rows * step.parts):
        score_part(np.int64(index), np.int64(index) // step.parts, step)
    for index in numba.prange(step.rows):
        mark_row(np.int64(index), np.int64(index), step)
    for index in numba.prange(step.rows * step.parts):
        candidates_of_part(np.int64(index), np.int64(index) // step.parts, step)
    if step.last_stage < SELECT:
        return
    for index in numba.prange(step.rows):
        take_row(np.int64(index), np.int64(index), step)
