"""The search for codes of nibbles, from inner products that other kernels have left in memory.

A warp searches for the code of one key: each thread holds two of the candidates of a step.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.encode import Hashing, Products, deliver, only
from bpc_calib.backends.triton.language import INT32_MAX
from bpc_calib.method import nibbles

__all__ = ["NibblesShape", "nibbles_kernel"]

NIBBLE = tl.constexpr(nibbles.NIBBLE)
BEAM = tl.constexpr(nibbles.BEAM)
PLACE = tl.constexpr(nibbles.PLACE)
CANDIDATES = tl.constexpr(nibbles.BEAM * nibbles.NIBBLE)
AHEAD = tl.constexpr(8)  # rows of the Gram matrix that are loaded at once: a size to tune, which changes no result


class NibblesShape(NamedTuple):
    """Constants of a compiled kernel."""

    H_KV: int
    H: int
    BLOCK: int  # keys: as many as warps
    PAGE: int  # as in `EncodeShape`


@triton.jit
def of_beam(beam, x):
    """The entry of the tuple `x` that `beam` names."""
    return tl.where(beam < 2, tl.where(beam == 0, x[0], x[1]), tl.where(beam == 2, x[2], x[3]))


@triton.jit
def by_lane(beam, x):
    """`[BLOCK, CANDIDATES]`: the entry of the tuple `x` of `[BLOCK]` of the beam of each candidate."""
    return of_beam(beam[None, :], (x[0][:, None], x[1][:, None], x[2][:, None], x[3][:, None]))


@triton.jit
def nibble_of(low, high, i, H: tl.constexpr):
    """Nibble `i` of codes of one or two words."""
    word = low
    if H > 64:
        word = tl.where(i < 16, low, high)
    return (word >> (i % 16 * 4)).to(tl.int32) & (NIBBLE - 1)


@triton.jit
def with_nibble(word, nibble, i, FIRST: tl.constexpr):
    """A word of codes, of nibbles from `FIRST` on, with nibble `i` if that is one of them."""
    here = (i >= FIRST) & (i < FIRST + 16)
    return word | tl.where(here, nibble.to(tl.int64) << (i % 16 * 4), 0)


@triton.jit
def own_products(scores, gram, vector, inside, R: tl.constexpr):
    """The products of the vectors of a nibble with the keys, and with themselves; none behind the last nibble."""
    there = vector < R
    of_keys = tl.load(scores[:, None] + vector[None, :], mask=inside[:, None] & there[None, :], other=0)
    return of_keys, tl.load(gram + vector * (R + 1), mask=there, other=0)


@triton.jit
def added(adding, gram, low, high, j, vector, H: tl.constexpr):
    """What each candidate adds, with its products with the vectors that its partial code names before nibble `j`."""
    for first in range(0, j, AHEAD):
        for some in tl.static_range(AHEAD):
            i = first + some
            row = gram + (i * NIBBLE + nibble_of(low, high, i, H)) * (4 * H)
            later = vector >= (i + 1) * NIBBLE
            # Minus 0 changes no number it is added to.
            adding = adding + 2 * tl.load(row + vector[None, :], mask=later[None, :], other=-0.0)
    return adding


@triton.jit
def sort_keys(costs, place):
    """int32 in the order of the costs, but for their lowest 6 bits, which hold the place of each candidate."""
    bits = costs.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & INT32_MAX)
    return (ordered & ~PLACE) | place[None, :]


@triton.jit(do_not_specialize=["n"])
def nibbles_kernel(
    products: Products, encoder: Hashing, codes: Strided, error: Strided, gain: Strided, slots, n, shape: tl.constexpr
):
    """`bpc_calib.method.nibbles.encode_nibbles`: the same sums in the same order. Grid (blocks of keys, rows).

    Codes go where `deliver` writes them. Before the first step there is only the empty code; as the others of that
    step cost infinity, none of theirs is taken.
    """
    H: tl.constexpr = shape.H
    R: tl.constexpr = 4 * H
    BLOCK: tl.constexpr = shape.BLOCK
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_key = row * n + at
    scores = products.scores + of_key * R
    wide = scores.dtype.element_ty
    gram = encoder.gram + (row // shape.H_KV * encoder.b + row % shape.H_KV) * (R * R)
    place = tl.arange(0, CANDIDATES)
    beam = place // NIBBLE
    v = place % NIBBLE
    cost = tl.zeros([BLOCK], wide)
    never = cost + float("inf")
    costs = (cost, never, never, never)
    empty = tl.zeros([BLOCK], tl.int64)
    lows = (empty, empty, empty, empty)
    highs = lows
    following = own_products(scores, gram, v, at < n, R)
    for j in range(H // 4):
        vector = v + j * NIBBLE
        adding = following[1][None, :] - 2 * following[0]
        following = own_products(scores, gram, vector + NIBBLE, at < n, R)  # always a step ahead
        adding = added(adding, gram, by_lane(beam, lows), by_lane(beam, highs), j, vector, H)
        candidates = by_lane(beam, costs) + adding
        keys = sort_keys(candidates, place)
        new_costs = ()
        new_lows = ()
        new_highs = ()
        for _ in tl.static_range(BEAM):
            best = tl.min(keys, 1) & PLACE
            mine = place[None, :] == best[:, None]
            keys = tl.where(mine, INT32_MAX, keys)
            old = best // NIBBLE
            new = best % NIBBLE
            new_costs += (only(mine, candidates, True),)
            new_lows += (with_nibble(of_beam(old, lows), new, j, 0),)
            new_highs += (with_nibble(of_beam(old, highs), new, j, 16),)
        costs = new_costs
        lows = new_lows
        highs = new_highs
    squared_norm = tl.load(products.squared_norm + of_key, mask=at < n, other=0)
    product = tl.zeros([BLOCK], wide)
    for j in tl.static_range(H // 4):
        named = j * NIBBLE + nibble_of(lows[0], highs[0], j, H)
        product = product + tl.load(scores + named, mask=at < n, other=0)
    deliver(lows[0], highs[0], squared_norm + costs[0], product, squared_norm, codes, error, gain, slots, at, n, shape)
