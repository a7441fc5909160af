"""What the kernel `choose` works on."""

from typing import NamedTuple

__all__ = ["Step"]


class Step(NamedTuple):
    """Sizes, rules, and where tensors lie.

    A tensor is its address and its strides in elements: `_b` over sequences, `_h` over KV heads, `_g` over query heads,
    `_n` over bits. The address 0 stands for a tensor that was not given. A row is a KV head of a sequence; H stands for
    its query heads, rounded up to whole fours.
    """

    stages: int  # how many run: `PROJECT`, `SCORE` or `SELECT`
    element: int  # of query and projection, as in `widen_row`: the kernel is the same for all of them

    rows: int
    kv_heads: int
    heads: int  # query heads per KV head
    dim: int
    bits: int  # of a code
    words: int  # of 64 bits, per code
    tokens: int

    slots: int  # rows whose memory is there at once
    parts: int  # of each row
    part_size: int  # tokens

    # What is given.
    query: int
    query_b: int
    query_h: int
    query_g: int
    projection: int
    projection_b: int
    projection_h: int
    projection_n: int
    codes: int  # contiguous from the tokens on
    codes_b: int
    codes_h: int
    codes_slot: int  # over slots: of codes that are copied there, else 0
    gain: int
    gain_b: int
    gain_h: int
    gain_slot: int
    valid: int
    valid_b: int
    lengths: int  # int64 [B]
    worst: int  # int32 [rows, worst_count]
    worst_count: int
    ks: int  # int64
    ks_b: int
    ks_h: int
    k: int  # where `ks` is not given

    # The rules.
    group: int  # one of `GROUP_CODES`
    recent: int
    sink: int
    numerator: int  # of the safeguard
    denominator: int
    scaling: float

    # What the stages leave to each other.
    totals: int  # int32 [rows, H], sums of the rounded queries
    table_size: int  # int32 per table
    tables: int  # int32 [rows, H / 4, table_size]
    stride: int  # tokens and room behind them
    products: int  # int16 [slots, H, stride]
    best: int  # int32 [rows, parts, H], the best score of each head
    sample: int  # `sample_size` bytes per slot
    marks: int  # uint64 [slots, stride / 64], a bit per token: whether it is forced
    least: int  # int32 [rows], the rank from which on a token is a candidate
    candidates: int  # int32 [slots, 2, stride], places and ranks
    counts: int  # int64 [rows, parts], candidates

    # The results.
    values: int  # int8 [rows, heads, bits], the rounded queries
    scale: int  # float32 [rows]
    indices: int  # int64 [rows, width]
    width: int
