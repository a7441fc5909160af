"""A step up to the tokens chosen, as one kernel: a thread takes a row from its query to its list while it is cached.

Where there are fewer rows than would keep all threads busy, a row is scored in parts, and all wait for each other
between the stages.
"""

import numba
import numpy as np

from bpc_calib.backends.cpu.attend import Attention, attend_part, put_together
from bpc_calib.backends.cpu.compiling import compiled, inlined
from bpc_calib.backends.cpu.encode import Hashing, hash_row
from bpc_calib.backends.cpu.prep import prep_row
from bpc_calib.backends.cpu.score import score_part
from bpc_calib.backends.cpu.step import Step
from bpc_calib.backends.cpu.take import candidates_of_part, mark_row, take_row

__all__ = ["PROJECT", "SCORE", "SELECT", "choose_kernel", "choose_rows", "step_kernel"]

PROJECT, SCORE, SELECT = 1, 4, 5  # how many stages run: queries rounded; keys ranked; tokens chosen
SCORING, GATHERING = 1, 3  # the stages that a row has in parts


@inlined
def take_stages(begin, end, slot, first, last, step):
    """The stages from `first` to before `last` of the rows from `begin` to before `end`, or of such parts of rows.

    The only place that calls them: every further one is compiled with all of them again.
    """
    for item in range(begin, end):
        for stage in range(first, last):
            if stage == 0:
                prep_row(item, step)
            elif stage == SCORING:
                score_part(item, slot, step)
            elif stage == 2:
                mark_row(item, slot, step)
            elif stage == GATHERING:
                candidates_of_part(item, slot, step)
            else:
                take_row(item, slot, step)


@inlined
def choose_rows(begin, end, slot, step):
    """All stages of rows of one part, one row after the other."""
    take_stages(begin, end, slot, np.int64(0), step.stages, step)  # numba would compile for a literal 0, too


@inlined
def take_item(index, stage, step):
    """What one thread does at a time: all stages of the rows of a slot, or one stage of a part of a row."""
    if step.parts == 1:
        begin, end = index * step.rows // step.slots, (index + 1) * step.rows // step.slots
        slot, first, last = index, 0, step.stages
    else:
        begin, end, first, last = index, index + 1, stage, stage + 1
        slot = index // step.parts if stage in (SCORING, GATHERING) else index
    take_stages(begin, end, slot, first, last, step)


@compiled(parallel=True)
def choose_kernel(fields):
    """The stages of a `Step`, given as a plain tuple: numba unboxes a named one ten times as slowly.

    Rows in one part take turns in the slots; rows in several parts have a slot each.
    """
    step = Step(*fields)
    whole = step.parts == 1
    for stage in range(1 if whole else step.stages):
        items = step.slots if whole else step.rows * (step.parts if stage in (SCORING, GATHERING) else 1)
        for index in numba.prange(items):
            take_item(np.int64(index), stage, step)


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
