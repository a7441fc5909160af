"""Launches of the kernels that hash: many keys, or the one of a new token."""

import torch
import triton
from torch import Tensor

from bpc_calib.backends.limits import tight
from bpc_calib.backends.triton.append import AppendShape, append_kernel
from bpc_calib.backends.triton.arguments import strided
from bpc_calib.backends.triton.encode import EncodeShape, Hashing, encode_kernel, greedy_kernel
from bpc_calib.backends.triton.language import ROUNDED_TWICE
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.state import State

__all__ = ["append", "encode_gram", "encode_with", "hash_into"]

# Sizes to tune on a GPU; none changes a result.
HASHED = 64  # keys that one program hashes
PART = 32  # dimensions of these keys at a time
FEW = 8  # keys of a sequence that are hashed by programs of their own
APPENDED = 8192  # entries of a matrix that `append` reads at once


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
    bits, hashing = 32, Hashing(None, None, None, None, 0)
    if codebook is not None:
        bits, hashing = codebook.bits, _hashing(codebook, batch, kv_heads)
    dim_up, width_up = (max(16, triton.next_power_of_2(size)) for size in (dim, width))
    read = APPENDED if dim_up <= 128 else APPENDED // 2  # longer keys take registers, too
    to = (None, None) if value is None else (state.keys, state.values)
    append_kernel[(batch * kv_heads, tokens)](
        strided(key), strided(value), at, hashing, *map(strided, (*to, state.codes, state.gain, state.error)),
        AppendShape(
            H_KV=kv_heads, H=bits, D=dim, D_UP=dim_up, V=width, V_UP=width_up,
            PART=min(dim_up, read // bits), ROWS=dim_up if dim_up <= 128 else read // dim_up, PAGE=page,
        ),
        num_warps=4, num_stages=1, **ROUNDED_TWICE,
    )  # fmt: skip


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
    batch, kv_heads, tokens, dim = keys.shape
    if not tokens:
        return
    bits, page = codebook.bits, 0 if at is None else state.room
    if tokens <= FEW:
        _append(codebook, keys, None, state, at, page)
        return
    encode_kernel[(triton.cdiv(tokens, HASHED), batch * kv_heads)](
        strided(keys), _hashing(codebook, batch, kv_heads), strided(state.codes), None if page else state.error,
        strided(state.gain), at, tokens,
        EncodeShape(H_KV=kv_heads, H=bits, D=dim, PART=PART, BLOCK=HASHED, PAGE=page),
        num_warps=hash_warps(bits, keys.element_size()), num_stages=1, **ROUNDED_TWICE,
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


def _empty(shape: tuple[int, ...], bits: int, device: torch.device) -> Encoded:
    return Encoded(
        codes=torch.empty(*shape, -(-bits // 64), dtype=torch.int64, device=device),
        error=torch.empty(shape, dtype=torch.float32, device=device),
        gain=torch.empty(shape, dtype=torch.uint8, device=device),
    )
