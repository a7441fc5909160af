"""Launches of the kernels that hash: many keys, or the one of a new token."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from bpc_calib.backends.limits import tight
from bpc_calib.backends.triton.append import AppendShape, append_kernel
from bpc_calib.backends.triton.arguments import strided
from bpc_calib.backends.triton.encode import EncodeShape, Hashing, Products, encode_kernel, greedy_kernel
from bpc_calib.backends.triton.language import INTERPRET, ROUNDED_TWICE, registers
from bpc_calib.backends.triton.nibbles import NibblesShape, nibbles_kernel
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.state import State

__all__ = ["append", "encode_gram", "encode_nibbles", "encode_with", "hash_into"]

# Sizes to tune on a GPU; none changes a result.
HASHED = 64  # keys that one program hashes
PART = 32  # dimensions of these keys at a time
FEW = 8  # keys of a sequence that are hashed by programs of their own
APPENDED = 8192  # entries of a matrix that `append` reads at once
MULTIPLIED = 128  # vectors of nibbles that a program multiplies keys with
LESS_MULTIPLIED = 64  # the same of few keys, and of more than 16 bits per number
SEARCHED = 4  # keys whose nibbles a program searches for, a warp each
APPEND_REGISTERS = 216  # of a thread that hashes one key of 65 to 128 dimensions: for some GPUs the compiler takes more
HASH_REGISTERS = 248  # of a thread that hashes keys for pages: with fewer some would be put aside
SEARCH_REGISTERS = 64  # of the warp that searches for the code of one key
SCRATCH = 64 << 20  # bytes of products in memory at once: more keys are hashed one piece after the other

SIGNS = Products(None, None)


def hash_warps(bits: int, size: int) -> int:
    """Warps that hash keys of `size` bytes per number: four, which need no barrier, where their registers suffice."""
    return 4 if bits <= 64 and size == 2 else 8


def append(state: State, codebook: Codebook | None, key: Tensor, value: Tensor, at: Tensor) -> None:
    """`bpc_calib.method.step.append` of one token of each sequence, with its value."""
    hashed = State(state.keys, state.values) if codebook is None else state
    _append(codebook, tight(key), tight(value), hashed, at)


def _append(
    codebook: Codebook | None, key: Tensor, value: Tensor | None, state: State, at: Tensor | None, page: int = 0
) -> None:
    """Hash few keys; with values, write both, too."""
    (batch, kv_heads, tokens, dim), width = key.shape, key.shape[-1] if value is None else value.shape[-1]
    bits = rows = columns = 32
    hashing, products = Hashing(None, None, None, None, 0), SIGNS
    if codebook is not None:
        bits, rows, hashing = codebook.bits, codebook.matrix.shape[-1], _hashing(codebook, batch, kv_heads)
        columns, products = rows, _products(codebook, key)
        if codebook.nibbles:
            columns = LESS_MULTIPLIED
    dim_up, width_up = (max(16, triton.next_power_of_2(size)) for size in (dim, width))
    read = APPENDED if dim_up <= 128 else APPENDED // 2  # longer keys take registers, too
    to = (None, None) if value is None else (state.keys, state.values)
    usual = rows <= 64 and dim_up == 128 and key.dtype.itemsize == 2
    append_kernel[(batch * kv_heads, tokens, rows // columns)](
        strided(key), strided(value), at, hashing, products,
        *map(strided, (*to, state.codes, state.gain, state.error)),
        AppendShape(
            H_KV=kv_heads, H=bits, R=rows, COLUMNS=columns, D=dim, D_UP=dim_up, V=width, V_UP=width_up,
            PART=min(dim_up, read // columns), ROWS=dim_up if dim_up <= 128 else read // dim_up, PAGE=page,
        ),
        num_warps=4, num_stages=1, **registers(APPEND_REGISTERS, limited=usual), **ROUNDED_TWICE,
    )  # fmt: skip
    if codebook is not None and codebook.nibbles:
        _search(products, hashing, state, kv_heads, at, page, searched=1)


def encode_with(codebook: Codebook, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with` for keys `[B, H_KV, N, D]`."""
    encoded = _empty(keys.shape[:3], codebook.bits, keys.device)
    _encode(codebook, keys, State(keys, keys, encoded.codes, encoded.gain, encoded.error), at=None)
    return encoded


def hash_into(codebook: Codebook, keys: Tensor, state: State, at: Tensor) -> None:
    """Write the codes and gains of keys `[1, H_KV, T, D]` to their slots `at [T]`, of pages."""
    _encode(codebook, tight(keys), state, at=at.contiguous())


def _encode(codebook: Codebook, keys: Tensor, state: State, *, at: Tensor | None) -> None:
    """Write the codes and gains of keys to their slots, or without slots in order."""
    codebook.check(keys)
    tokens, page = keys.shape[2], 0 if at is None else state.room
    if not tokens:
        return
    if tokens <= FEW:
        _append(codebook, keys, None, state, at, page)
        return
    piece = _piece(codebook, keys)
    for first in range(0, tokens, piece):
        some = slice(first, first + piece)
        if at is not None:
            _encode_piece(codebook, keys[:, :, some], state, at[some], page)
            continue
        kept = {name: getattr(state, name) for name in ("codes", "gain", "error")}
        kept = {name: None if each is None else each[:, :, some] for name, each in kept.items()}
        _encode_piece(codebook, keys[:, :, some], replace(state, **kept), None, page)


def _piece(codebook: Codebook, keys: Tensor) -> int:
    """Keys of each KV head that are hashed at once, a multiple of the block: all of them for signs."""
    (batch, kv_heads, tokens, _), matrix = keys.shape, codebook.matrix
    if not codebook.nibbles:
        return tokens
    each = batch * kv_heads * matrix.shape[-1] * matrix.element_size()
    return max(1, SCRATCH // (each * HASHED)) * HASHED


def _encode_piece(codebook: Codebook, keys: Tensor, state: State, at: Tensor | None, page: int) -> None:
    batch, kv_heads, tokens, dim = keys.shape
    bits, rows, hashing = codebook.bits, codebook.matrix.shape[-1], _hashing(codebook, batch, kv_heads)
    products, columns = _products(codebook, keys), rows
    if codebook.nibbles:
        columns = MULTIPLIED if keys.element_size() == 2 else LESS_MULTIPLIED
    encode_kernel[(triton.cdiv(tokens, HASHED), batch * kv_heads, rows // columns)](
        strided(keys), hashing, products, *map(strided, (state.codes, state.error, state.gain)), at, tokens,
        EncodeShape(H_KV=kv_heads, H=bits, R=rows, COLUMNS=columns, D=dim, PART=PART, BLOCK=HASHED, PAGE=page),
        num_warps=hash_warps(columns, keys.element_size()), num_stages=1,
        **registers(HASH_REGISTERS, limited=bool(page)), **ROUNDED_TWICE,
    )  # fmt: skip
    if codebook.nibbles:
        _search(products, hashing, state, kv_heads, at, page, searched=SEARCHED)


def _products(codebook: Codebook, keys: Tensor) -> Products:
    """Memory for the products of keys `[B, H_KV, n, D]`, which only the search for nibbles needs."""
    if not codebook.nibbles:
        return SIGNS
    size, like = (keys.shape[0] * keys.shape[1], keys.shape[2]), codebook.matrix
    scores = torch.empty(*size, like.shape[-1], dtype=like.dtype, device=keys.device)
    return Products(scores, torch.empty(size, dtype=like.dtype, device=keys.device))


def _search(
    products: Products, hashing: Hashing, state: State, kv_heads: int, at: Tensor | None, page: int, searched: int
) -> None:
    """Write codes, errors and gains of keys whose products are known, so many by each program."""
    rows, tokens, size = products.scores.shape
    if INTERPRET:  # the interpreter's time is that of operations, whatever their size
        searched = 64
    nibbles_kernel[(triton.cdiv(tokens, searched), rows)](
        products, hashing, *map(strided, (state.codes, state.error, state.gain)), at, tokens,
        NibblesShape(H_KV=kv_heads, H=size // 4, BLOCK=searched, PAGE=page),
        num_warps=searched, num_stages=1, **registers(SEARCH_REGISTERS, limited=searched == 1), **ROUNDED_TWICE,
    )  # fmt: skip


def _hashing(codebook: Codebook, batch: int, kv_heads: int) -> Hashing:
    """What a kernel needs of a codebook: tensors that are contiguous and have all leading dimensions."""
    own = codebook.matrix.dim() == 4 and codebook.matrix.shape[0] > 1  # each sequence has projections of its own
    matrix, gram, metric, mean = (
        None if each is None else each.expand(batch if own else 1, kv_heads, *each.shape[-rank:]).contiguous()
        for each, rank in ((codebook.matrix.mT, 2), (codebook.gram, 2), (codebook.metric, 2), (codebook.mean, 1))
    )
    return Hashing(matrix, gram, metric, mean, kv_heads if own else 0)


def encode_gram(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_gram` for products `[rows, N, H]`."""
    rows, tokens, bits = scores.shape
    encoded = _empty((rows, tokens), bits, scores.device)
    gram = gram.expand(rows, bits, bits).contiguous()
    greedy_kernel[(triton.cdiv(tokens, HASHED), rows)](
        scores.contiguous(), squared_norm.expand(rows, tokens).contiguous(), gram, encoded.codes,
        encoded.error, encoded.gain, tokens, bits * bits, H=bits, BLOCK=HASHED,
        num_warps=hash_warps(bits, 2), **ROUNDED_TWICE,
    )  # fmt: skip
    return encoded


def encode_nibbles(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """`bpc_calib.method.nibbles.encode_nibbles` for products `[rows, N, R]`."""
    rows, tokens, size = scores.shape
    encoded = _empty((rows, 1, tokens), size // 4, scores.device)
    hashing = Hashing(None, gram.expand(rows, size, size).contiguous(), None, None, 1)
    products = Products(scores.contiguous(), squared_norm.expand(rows, tokens).contiguous())
    state = State(scores, scores, encoded.codes, encoded.gain, encoded.error)
    _search(products, hashing, state, kv_heads=1, at=None, page=0, searched=SEARCHED)
    return Encoded(*(each.squeeze(1) for each in (encoded.codes, encoded.error, encoded.gain)))


def _empty(shape: tuple[int, ...], bits: int, device: torch.device) -> Encoded:
    return Encoded(
        codes=torch.empty(*shape, -(-bits // 64), dtype=torch.int64, device=device),
        error=torch.empty(shape, dtype=torch.float32, device=device),
        gain=torch.empty(shape, dtype=torch.uint8, device=device),
    )
