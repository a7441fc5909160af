"""A step up to the tokens chosen, as one kernel: a thread takes a row from its query to its list while it is cached.

Where there are fewer rows than would keep all threads busy, a row is scored in parts, and all wait for each other
between the stages.
"""

import numba
import numpy as np

from bpc_calib.backends.cpu.language import compiled, inlined
from bpc_calib.backends.cpu.prep import prep_row
from bpc_calib.backends.cpu.score import PAD, multiply
from bpc_calib.backends.cpu.take import candidates_of_part, mark_row, take_row

__all__ = ["PROJECT", "SCORE", "SELECT", "choose_kernel"]

PROJECT, SCORE, SELECT = 1, 2, 3  # the stages, each with those before it


@inlined
def rows_in_turn(
    slot, slots, stages, rows, like, query, query_b, query_h, query_g, projection, projection_b, projection_h,
    projection_n, kv_heads, heads, bits, dim, words, values, totals, scale, tables, table_size, tokens, group, codes,
    codes_b, codes_h, gain, gain_b, gain_h, valid, valid_b, lengths, scaling, kept, best, stride, sampled, k, ks,
    ks_b, ks_h, recent, sink, worst, listed, numerator, denominator, marks, least, spare, counts, indices, width,
):  # fmt: skip
    """What the thread `slot` of `slots` does."""
    for row in range(slot * rows // slots, (slot + 1) * rows // slots):
        prep_row(
            row, like, query, query_b, query_h, query_g, projection, projection_b, projection_h, projection_n,
            kv_heads, heads, bits, dim, words, values, totals, scale, tables, table_size,
        )  # fmt: skip
        if stages < SCORE:
            continue
        multiply(
            row, kv_heads, heads, tokens, words, 1, tokens + PAD, codes, codes_b, codes_h, gain, gain_b, gain_h, valid,
            valid_b, lengths, tables, table_size, totals, kept, best, stride, sampled, slot,
        )  # fmt: skip
        mark_row(
            row, kv_heads, heads, tokens, 1, group, gain, valid, valid_b, lengths, scale, scaling, best, stride,
            sampled, k, ks, ks_b, ks_h, recent, sink, worst, listed, numerator, denominator, width, marks, least, slot,
        )  # fmt: skip
        candidates_of_part(
            row, kv_heads, heads, tokens, 1, tokens + PAD, group, gain, gain_b, gain_h, valid, valid_b, lengths, scale,
            scaling, kept, best, stride, marks, least, spare, counts, slot,
        )  # fmt: skip
        if stages < SELECT:
            continue
        take_row(
            row, kv_heads, heads, tokens, 1, tokens + PAD, group, gain, gain_b, gain_h, valid, valid_b, lengths, scale,
            scaling, kept, best, stride, k, ks, ks_b, ks_h, marks, least, spare, counts, indices, width, slot,
        )  # fmt: skip


@compiled(parallel=True)
def choose_kernel(
    slots, parts, stages, rows, like, query, query_b, query_h, query_g, projection, projection_b, projection_h,
    projection_n, kv_heads, heads, bits, dim, words, values, totals, scale, tables, table_size, tokens, group, codes,
    codes_b, codes_h, gain, gain_b, gain_h, valid, valid_b, lengths, scaling, kept, best, stride, sampled, k, ks,
    ks_b, ks_h, recent, sink, worst, listed, numerator, denominator, marks, least, spare, counts, indices, width,
):  # fmt: skip
    """All rows by `slots` threads where `parts` is 1, else with a slot a row."""
    if parts == 1:
        for index in numba.prange(slots):
            rows_in_turn(
                np.int64(index), slots, stages, rows, like, query, query_b, query_h, query_g, projection, projection_b,
                projection_h, projection_n, kv_heads, heads, bits, dim, words, values, totals, scale, tables,
                table_size, tokens, group, codes, codes_b, codes_h, gain, gain_b, gain_h, valid, valid_b, lengths,
                scaling, kept, best, stride, sampled, k, ks, ks_b, ks_h, recent, sink, worst, listed, numerator,
                denominator, marks, least, spare, counts, indices, width,
            )  # fmt: skip
        return
    size = ((tokens + parts - 1) // parts + PAD - 1) // PAD * PAD
    for index in numba.prange(rows):
        prep_row(
            np.int64(index), like, query, query_b, query_h, query_g, projection, projection_b, projection_h,
            projection_n, kv_heads, heads, bits, dim, words, values, totals, scale, tables, table_size,
        )  # fmt: skip
    if stages < SCORE:
        return
    for index in numba.prange(rows * parts):
        task = np.int64(index)
        multiply(
            task, kv_heads, heads, tokens, words, parts, size, codes, codes_b, codes_h, gain, gain_b, gain_h, valid,
            valid_b, lengths, tables, table_size, totals, kept, best, stride, sampled, task // parts,
        )  # fmt: skip
    for index in numba.prange(rows):
        row = np.int64(index)
        mark_row(
            row, kv_heads, heads, tokens, parts, group, gain, valid, valid_b, lengths, scale, scaling, best, stride,
            sampled, k, ks, ks_b, ks_h, recent, sink, worst, listed, numerator, denominator, width, marks, least, row,
        )  # fmt: skip
    for index in numba.prange(rows * parts):
        task = np.int64(index)
        candidates_of_part(
            task, kv_heads, heads, tokens, parts, size, group, gain, gain_b, gain_h, valid, valid_b, lengths, scale,
            scaling, kept, best, stride, marks, least, spare, counts, task // parts,
        )  # fmt: skip
    if stages < SELECT:
        return
    for index in numba.prange(rows):
        row = np.int64(index)
        take_row(
            row, kv_heads, heads, tokens, parts, size, group, gain, gain_b, gain_h, valid, valid_b, lengths, scale,
            scaling, kept, best, stride, k, ks, ks_b, ks_h, marks, least, spare, counts, indices, width, row,
        )  # fmt: skip
