"""The backend of a CPU: tensors become addresses and strides for the compiled kernels, nothing is copied.

What a step of a layer reads is written down once, in a record that is kept for its state; a step adds its query, its
sequences and its results.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bpc_calib.backends.cpu.dense_pass import dense_pass
from bpc_calib.backends.cpu.fitting import fit
from bpc_calib.backends.cpu.native import (
    ATTEND,
    ELEMENTS,
    HASH,
    PROJECT,
    SCORE,
    SELECT,
    Call,
    address,
    library,
    run,
)
from bpc_calib.backends.limits import tight, unserved
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.encoded import Encoded, joined
from bpc_calib.method.encoding import products
from bpc_calib.method.nibbles import NIBBLE
from bpc_calib.method.rules import Rules
from bpc_calib.method.scoring import QuantizedQuery
from bpc_calib.method.selection import as_fraction
from bpc_calib.method.state import Rows, State, write_codes, write_newest, write_tokens
from bpc_calib.method.step import check, check_append, check_listed, check_rows, check_state, newest

__all__ = ["append", "attend", "choose", "dense_decode", "encode_with", "fit", "serves", "sparse_decode"]

GROUPS = {"relative": 0, "max": 1}
FEW = 4  # tokens hashed in one kernel: for more, torch's products are faster
FEW_OF_PAGES = 8
BLOCK = 2048  # tokens of a prompt hashed at once
RUN = 16  # numbers of a value that lie 2 apart in a page for AMX: `PACKED` of native/attend.h
RANKS = PROJECT | SCORE | SELECT


@dataclass
class _Record:
    """The fields of a call that stay the same from step to step, and the tensors that they point to."""

    codebook: Codebook
    rules: Rules
    shape: torch.Size  # of the queries
    dtype: torch.dtype
    fields: Call
    kept: tuple[Tensor | None, ...]


_records: WeakKeyDictionary[State, _Record] = WeakKeyDictionary()


def serves(tensor: Tensor, state: State | None = None) -> str | None:
    """What about a call the kernels do not serve; None: nothing."""
    if state is not None and state.scales is not None:
        return "keys and values of 8 bits"
    codes, others = (None, ()) if state is None else (state.codes, (state.gain, state.error))
    if codes is not None and (codes.stride(3) != 1 or codes.stride(2) != codes.shape[3]):
        return "codes that do not lie one after the other"
    if any(each is not None and each.stride(2) != 1 for each in others):
        return "gains or errors that do not lie one after the other"
    return unserved(tensor, state)


def append(state: State, codebook: Codebook | None, key: Tensor, value: Tensor | None, at: Tensor) -> None:
    """`bpc_calib.method.step.append`."""
    check_append(state, codebook, key, value, at)
    if value is not None:
        write_tokens(key, value, at, state)
    if codebook is not None:
        hash_into(codebook, key, state, at)


def sparse_decode(
    query: Tensor,
    codebook: Codebook,
    state: State,
    rows: Rows,
    rules: Rules,
    *,
    fresh: int = 0,
    key: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`bpc_calib.method.step.sparse_decode`, in one call."""
    record = _known(query, codebook, state, rules)
    if record is None:
        check_state(query, codebook, state, paged=rows.block_table is not None)
        record = _records[state] = _recorded(query, codebook, state, rules)
    check_rows(query, state, rows, fresh, key, out)
    if fresh > FEW:
        write_newest(encode_with(codebook, newest(state, rows, fresh)), rows, state)
        fresh = 0
    call = Call.from_buffer_copy(record.fields)
    query, *kept = _ask(call, query, rows, state)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype), torch.empty(*query.shape[:2], rows.width, dtype=torch.int64)
    attention, indices = out
    call.stages = RANKS | ATTEND
    if fresh:
        call.stages |= HASH
        call.fresh_tokens, call.first = fresh, rows.longest - fresh
        call.fresh = state.keys.data_ptr() + call.first * call.keys_n * state.keys.element_size()
        call.fresh_b, call.fresh_h, call.fresh_n = call.keys_b, call.keys_h, call.keys_n
    elif key is not None:
        call.stages |= HASH
        key = tight(key)
        call.fresh_tokens, call.fresh = call.batch, key.data_ptr()
        call.fresh_n, call.fresh_h, *_ = key.stride()
    call.indices, call.out = indices.data_ptr(), attention.data_ptr()
    if not rows.width:
        attention.zero_()
        call.stages &= HASH
    if call.stages and query.numel():
        run(call)
    del kept
    return out


def dense_decode(query: Tensor, state: State, rows: Rows, scaling: float | None = None, *, new: int = 1) -> Tensor:
    """`bpc_calib.method.step.dense_decode`; for one token a kernel, without a list of all tokens."""
    if new > 1:
        return dense_pass(query, state, rows, scaling, new)
    check(query, None, state, rows)
    return _attend(query, state, rows, None, scaling)


def rank(
    query: Tensor, codebook: Codebook, state: State, rows: Rows, rules: Rules, *, stages: int = RANKS
) -> tuple[Tensor, QuantizedQuery]:
    """Some stages of `sparse_decode`: the tokens, which only `SELECT` writes, and the tables of the queries."""
    record = _known(query, codebook, state, rules) or _recorded(query, codebook, state, rules)
    call = Call.from_buffer_copy(record.fields)
    query, *kept = _ask(call, query, rows, state)
    batch, kv_heads, heads, _ = query.shape
    tables = torch.empty(batch, kv_heads, heads, codebook.bits // 4, NIBBLE, dtype=torch.int16)
    scale = torch.empty(batch, kv_heads, dtype=torch.float32)
    indices = torch.empty(batch, kv_heads, rows.width, dtype=torch.int64)
    call.stages, call.indices = stages, indices.data_ptr()
    call.entries, call.scale = tables.data_ptr(), scale.data_ptr()
    if tables.numel() and rows.width:
        run(call)
    del kept
    return indices, QuantizedQuery(tables, scale)


def choose(query: Tensor, codebook: Codebook, state: State, rows: Rows, rules: Rules) -> Tensor:
    """`bpc_calib.method.step.choose`."""
    check(query, codebook, state, rows)
    return rank(query, codebook, state, rows, rules)[0]


def attend(query: Tensor, state: State, rows: Rows, indices: Tensor, scaling: float | None = None) -> Tensor:
    """`bpc_calib.method.step.attend`: over listed tokens, int64 `[B, H_KV, k]`."""
    check(query, None, state, rows)
    check_listed(query, indices)
    return _attend(query, state, rows, indices.contiguous(), scaling)


def _attend(query: Tensor, state: State, rows: Rows, indices: Tensor | None, scaling: float | None) -> Tensor:
    """`attend`; without a list to every token."""
    call = Call(scaling=query.shape[-1] ** -0.5 if scaling is None else scaling)
    at = _place_keys(call, state)
    query, *kept = _ask(call, query, rows, state)
    out = torch.zeros(query.shape, dtype=query.dtype)
    call.stages, call.width = ATTEND, rows.longest if indices is None else indices.shape[-1]
    call.indices, call.out = address(indices), out.data_ptr()
    if call.width and query.numel() and run(call):
        assert indices is not None
        raise IndexError(f"a token is beyond the {rows.longest} there are: {int(indices.max())}")
    del kept, at
    return out


def hash_into(codebook: Codebook, keys: Tensor, state: State, at: Tensor) -> None:
    """Write the codes, gains and errors of keys `[B, H_KV, T, D]` to their slots `at [T]`, and copies; see `append`."""
    paged = keys.shape[0] != state.keys.shape[0] or keys.shape[0] == 1
    if keys.shape[2] > (FEW_OF_PAGES if paged else FEW):
        write_tokens(keys, None, at, state)
        write_codes(encode_with(codebook, keys), at, state)
        return
    assert state.codes is not None
    keys, at = tight(keys), at.to(torch.int64).contiguous()
    slots, room = at.tolist(), state.room * (state.keys.shape[0] if paged else 1)
    if slots and (max(slots) >= room or (min(slots) < 0 and not paged)):
        raise IndexError(f"slots {slots} are not all within the room for {room} tokens")
    record, kept = _records.get(state), None
    if record is not None and record.codebook is codebook and record.dtype == keys.dtype:
        call = Call.from_buffer_copy(record.fields)
    else:
        call = Call()
        kept = _hash(call, codebook, keys.dtype)
        _place_codes(call, state)
        _place_keys(call, state)
    call.stages, call.slots, call.page = HASH, at.data_ptr(), state.room if paged else 0
    _fresh(call, keys)
    run(call)
    del kept


def encode_with(codebook: Codebook, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`: few tokens in one kernel, many with torch's products."""
    codebook.check(keys)
    lead, tokens = keys.shape[:-2], keys.shape[-2]
    if tokens > FEW or not lead.numel():
        return _encode_many(codebook, keys)
    encoded, keys = _empty(lead, tokens, codebook.bits), tight(keys)
    call = Call(stages=HASH)
    kept = _hash(call, codebook, keys.dtype)
    _place_codes(call, State(keys, keys, encoded.codes, encoded.gain, encoded.error))
    _fresh(call, keys)
    run(call)
    del kept
    return encoded


def _encode_many(codebook: Codebook, keys: Tensor) -> Encoded:
    """Hash a block of tokens after the other: the products of a block are still cached in the next operation."""
    blocks = []
    with torch.autocast("cpu", enabled=False):
        panels = _panels(codebook.gram) if codebook.nibbles else None
        for block in keys.split(BLOCK // 4 if codebook.nibbles else BLOCK, -2):
            scores, gram, norms = products(codebook, block)
            blocks.append(encode_gram(scores, gram, norms) if panels is None else _search(scores, *panels, norms))
    return joined(blocks)


def encode_gram(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_gram` for float32 products `[B, H_KV, N, H]` or `[rows, N, H]`."""
    lead, (tokens, bits) = scores.shape[:-2], scores.shape[-2:]
    scores, norms = scores.contiguous(), squared_norm.expand(scores.shape[:-1]).contiguous()
    gram, encoded = gram.expand(*lead, bits, bits).contiguous(), _empty(lead, tokens, bits)
    library().bpc_greedy(
        torch.get_num_threads(), scores.data_ptr(), norms.data_ptr(), gram.data_ptr(), lead.numel(), tokens, bits,
        encoded.codes.data_ptr(), encoded.error.data_ptr(), encoded.gain.data_ptr(),
    )  # fmt: skip
    return encoded


def encode_nibbles(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """`bpc_calib.method.nibbles.encode_nibbles` for float32 products `[B, H_KV, N, R]` or `[rows, N, R]`."""
    return _search(scores, *_panels(gram), squared_norm)


def _panels(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return a Gram matrix `[..., R, R]` as `[..., R / 16, R, 16]`, a panel for each nibble, and its diagonal.

    What the search reads for one nibble is one panel, and lies in the nearest cache.
    """
    panels = gram.unflatten(-1, (-1, NIBBLE)).transpose(-3, -2).contiguous()
    return panels, gram.diagonal(dim1=-2, dim2=-1).contiguous()


def _search(scores: Tensor, panels: Tensor, squares: Tensor, squared_norm: Tensor) -> Encoded:
    lead, (tokens, size) = scores.shape[:-2], scores.shape[-2:]
    scores, norms = scores.contiguous(), squared_norm.expand(scores.shape[:-1]).contiguous()
    if lead[len(lead) - panels.dim() + 3 :] != panels.shape[:-3]:
        panels, squares = panels.expand(*lead, *panels.shape[-3:]), squares.expand(*lead, size)
    panels, squares = panels.contiguous(), squares.contiguous()  # as they are, unless they were expanded
    encoded = _empty(lead, tokens, size // 4)
    library().bpc_search(
        torch.get_num_threads(), scores.data_ptr(), norms.data_ptr(), panels.data_ptr(), squares.data_ptr(),
        panels.shape[:-3].numel(), lead.numel(), tokens, size // 4,
        encoded.codes.data_ptr(), encoded.error.data_ptr(), encoded.gain.data_ptr(),
    )  # fmt: skip
    return encoded


def _known(query: Tensor, codebook: Codebook, state: State, rules: Rules) -> _Record | None:
    """The record of a state, if it is of a checked step with these arguments."""
    record = _records.get(state)
    if record is None or record.codebook is not codebook or record.rules is not rules:
        return None
    return record if record.shape == query.shape and record.dtype == query.dtype else None


def _recorded(query: Tensor, codebook: Codebook, state: State, rules: Rules) -> _Record:
    call, projection = Call(), tight(codebook.projection)
    worst = None if state.worst is None or not rules.safeguard else state.worst.to(torch.int32).contiguous()
    numerator, denominator = (0, 1) if worst is None else as_fraction(rules.safeguard).as_integer_ratio()
    _put(call, "projection", projection, "bhn" if projection.dim() == 4 else "hn")
    kept = _hash(call, codebook, projection.dtype)
    _place_codes(call, state)
    at = _place_keys(call, state)
    call.gained, call.group, call.recent, call.sink = (
        state.gain is not None and rules.gain, GROUPS[rules.group], rules.recent, rules.sink,
    )  # fmt: skip
    call.numerator, call.denominator, call.scaling = numerator, denominator, rules.scale(projection.shape[-1])
    call.worst, call.worst_count = address(worst), 0 if worst is None else worst.shape[-1]
    return _Record(codebook, rules, query.shape, query.dtype, call, (projection, worst, at, *kept))


def _ask(call: Call, query: Tensor, rows: Rows, state: State) -> tuple[Any, ...]:
    """Fill in the query and the sequences of a step; return the query and others as the kernel reads them.

    Tensors are asked what they are before they are converted: a layer's weights have taken the place of torch's code in
    the caches, and a conversion that changes nothing takes 20 us then.
    """
    query, lengths, ks = tight(query), rows.lengths, rows.k
    if lengths.dtype != torch.int64 or not lengths.is_contiguous():
        lengths = lengths.to(torch.int64).contiguous()
    if ks.dtype != torch.int64:
        ks = ks.to(torch.int64)
    call.element = ELEMENTS[query.dtype]
    call.batch, call.kv_heads, call.heads, call.dim = query.shape
    call.query, (call.query_b, call.query_h, call.query_g, _) = query.data_ptr(), query.stride()
    call.tokens, call.width, call.lengths = rows.longest, rows.width, lengths.data_ptr()
    call.ks, (call.ks_b, call.ks_h) = ks.data_ptr(), ks.stride()
    if ks.shape[1] == 1:  # of all heads
        call.ks_h = 0
    valid, table = rows.valid, rows.block_table
    if valid is not None:
        valid = tight(valid)
        call.valid, call.valid_b = valid.data_ptr(), valid.stride(0)
    if table is not None:
        table = table if table.is_contiguous() else table.contiguous()
        call.table, call.pages, call.page = table.data_ptr(), table.shape[1], state.room
    return query, lengths, ks, valid, table


def _fresh(call: Call, keys: Tensor) -> None:
    """Fill in keys to hash, `[B, H_KV, T, D]`."""
    call.element, (call.batch, call.kv_heads, call.fresh_tokens, call.dim) = ELEMENTS[keys.dtype], keys.shape
    _put(call, "fresh", keys, "bhn")


def _place_keys(call: Call, state: State) -> Tensor | None:
    """Fill in keys and values; return the tensor that tells the kernel where numbers lie in pages."""
    at = state.values_at
    _put(call, "keys", state.keys, "bhn")
    _put(call, "values", state.values, "bhn" if at is None else "bh")
    call.mapped, call.copied, call.run = state.mapped, state.copied, 1
    if at is not None and state.values.element_size() == 2 and at.shape[1] % RUN == 0:
        runs = at.unflatten(1, (-1, RUN))
        if (runs.diff() == 2).all():
            at, call.run = runs[..., 0].contiguous(), RUN
    call.values_at = address(at)
    return at


def _place_codes(call: Call, state: State) -> None:
    codes = state.codes
    assert codes is not None
    call.words = codes.shape[3]
    _put(call, "codes", codes, "bh")
    for name, each in (("gain", state.gain), ("error", state.error)):
        if each is not None:
            _put(call, name, each, "bh")


def _hash(call: Call, codebook: Codebook, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Fill in what hashes keys of a dtype; return the tensors that the kernel reads there."""
    # Without a metric the matrix has the numbers of the projection, which takes half the memory in 16 bits.
    same = codebook.metric is None and codebook.projection.dtype == dtype
    matrix = codebook.projection if same else codebook.matrix.mT
    call.matrix_element = ELEMENTS[matrix.dtype]
    call.bits, call.nibbles = codebook.bits, codebook.nibbles
    call.codebooks = codebook.matrix.shape[:-2].numel()
    tensors = {
        "matrix": matrix, "gram": codebook.gram, "metric": codebook.metric, "mean": codebook.mean,
    }  # fmt: skip
    squares = codebook.gram.diagonal(dim1=-2, dim2=-1).contiguous() if codebook.nibbles else None
    call.squares = address(squares)
    kept = [squares]
    for name, each in tensors.items():
        rank = 1 if name == "mean" else 2
        # Of a metric or mean that all heads share, each codebook has a copy.
        whole = None if each is None else each.expand(*codebook.matrix.shape[:-2], *each.shape[-rank:]).contiguous()
        setattr(call, name, address(whole))
        setattr(call, f"{name}_r", 0 if whole is None else whole.shape[-rank:].numel())
        kept.append(whole)
    return tuple(kept)


def _put(call: Call, name: str, tensor: Tensor, dimensions: str) -> None:
    """Fill in a tensor: its address, and its first strides."""
    setattr(call, name, tensor.data_ptr())
    for each, stride in zip(dimensions, tensor.stride(), strict=False):
        setattr(call, f"{name}_{each}", stride)


def _empty(lead: torch.Size, tokens: int, bits: int) -> Encoded:
    """Room for the codes of keys `[*lead, tokens, D]`."""
    return Encoded(
        codes=torch.empty(*lead, tokens, -(-bits // 64), dtype=torch.int64),
        error=torch.empty(*lead, tokens, dtype=torch.float32),
        gain=torch.empty(*lead, tokens, dtype=torch.uint8),
    )
