"""A whole decoding step of a layer: hash the newest key, choose tokens by their codes, attend to them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice, choose
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder, encode_with
from bpc_calib.method.sparse_attention import sparse_attention

__all__ = ["Hashed", "cached", "check", "in_use", "newest", "step", "store"]


@dataclass(frozen=True)
class Hashed:
    """What a layer holds when a step begins: all tokens but the newest have codes."""

    projection: Tensor  # [H_KV, H, D] or [B, H_KV, H, D]
    encoder: Encoder  # made from the projection, for keys of their dtype
    slots: Slots  # buffers with room for at least `length` tokens each; `codes` is not None
    length: int  # tokens in use; the newest has a key and a value, and no code yet
    worst: Tensor | None = None  # as in `Cached`


def step(query: Tensor, hashed: Hashed, k: int, choice: Choice) -> Tensor:
    """Hash the newest key into the slots, choose `k` tokens, and attend to them.

    Args:
        query: `[B, H_KV, G, D]`.
        hashed: keys, values and codes.
        k: number of tokens, at most `hashed.length`.
        choice: how to rank; its `scaling` is also that of attention.

    Returns:
        `[B, H_KV, G, D]` in the query's dtype.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check(query, hashed, k)
    store(encode_with(hashed.encoder, newest(hashed)), hashed)
    chosen = choose(query, hashed.projection, cached(hashed), k, choice)
    return sparse_attention(query, *in_use(hashed), chosen, choice.scaling)


def newest(hashed: Hashed) -> Tensor:
    """Return the key that has no code yet, `[B, H_KV, 1, D]`."""
    return hashed.slots.keys[:, :, hashed.length - 1 : hashed.length]


def store(encoded: Encoded, hashed: Hashed) -> None:
    """Write the code, the gain and the error of the newest key into the slots that are kept."""
    slots, place = hashed.slots, hashed.length - 1
    for to, new in ((slots.codes, encoded.codes), (slots.gain, encoded.gain), (slots.error, encoded.error)):
        if to is not None:
            to[:, :, place : place + 1] = new


def in_use(hashed: Hashed) -> tuple[Tensor, Tensor]:
    """Return the keys and values in use, `[B, H_KV, length, D]` each."""
    return hashed.slots.keys[:, :, : hashed.length], hashed.slots.values[:, :, : hashed.length]


def cached(hashed: Hashed) -> Cached:
    """Return what `choose` reads of the tokens in use."""
    slots, length = hashed.slots, hashed.length
    assert slots.codes is not None
    gain = None if slots.gain is None else slots.gain[:, :, :length]
    return Cached(slots.codes[:, :, :length], gain, worst=hashed.worst)


def check(query: Tensor, hashed: Hashed, k: int) -> None:
    """Raise `InputError` unless `step` accepts the arguments. Reads no tensor values, not to wait for a device.

    Args:
        query: `[B, H_KV, G, D]`.
        hashed, k: as in `step`.
    """
    slots, length = hashed.slots, hashed.length
    batch, kv_heads, _, dim = query.shape
    projection = hashed.projection
    if slots.codes is None:
        raise InputError("a step needs codes")
    if query.dtype != slots.keys.dtype or projection.shape[-3] != kv_heads or projection.shape[-1] != dim:
        raise InputError(
            f"query {query.dtype} {list(query.shape)} does not fit keys {slots.keys.dtype} {list(slots.keys.shape)} "
            f"and projection {list(projection.shape)}"
        )
    hashed.encoder.check(query)
    words = -(-projection.shape[-2] // 64)
    for name, tensor, last, dtype in (
        ("keys", slots.keys, (dim,), query.dtype),
        ("values", slots.values, (dim,), query.dtype),
        ("codes", slots.codes, (words,), torch.int64),
        ("gain", slots.gain, (), torch.uint8),
        ("error", slots.error, (), torch.float32),
    ):
        if tensor is None:
            continue
        shape = tensor.shape
        if shape[:2] != (batch, kv_heads) or shape[3:] != last or shape[2] < length or tensor.dtype != dtype:
            raise InputError(f"{name} {tensor.dtype} {list(shape)} does not fit {length} tokens of {list(query.shape)}")
    if not 1 <= k <= length:
        raise InputError(f"k must be between 1 and the {length} cached tokens, not {k}")
