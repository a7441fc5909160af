"""One new token per sequence in buffers of fixed size: the plain torch form."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codes import check_codes
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import Encoder, encode_with

__all__ = ["Slots", "append", "check", "write"]


@dataclass(frozen=True)
class Slots:
    """Buffers with room for `N` tokens, that `append` writes to."""

    keys: Tensor  # [B, H_KV, N, D]
    values: Tensor  # [B, H_KV, N, V], of the dtype of the keys
    codes: Tensor | None = None  # int64 [B, H_KV, N, W]; None: nothing is hashed
    gain: Tensor | None = None  # uint8 [B, H_KV, N]; None: not kept
    error: Tensor | None = None  # float32 [B, H_KV, N]; None: not kept


def append(encoder: Encoder | None, key: Tensor, value: Tensor, place: Tensor, slots: Slots) -> None:
    """Write one token of each sequence, in place: key, value, and the code, gain and error of the key.

    Args:
        encoder: for keys of their dtype; None if `slots.codes` is.
        key: `[B, H_KV, 1, D]`.
        value: `[B, H_KV, 1, V]`.
        place: int64 `[1]`, the slot to write, on the device of the buffers and within them.
        slots: the buffers.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check(encoder, key, value, place, slots)
    write(key, value, None if encoder is None else encode_with(encoder, key), place, slots)


def write(key: Tensor, value: Tensor, encoded: Encoded | None, place: Tensor, slots: Slots) -> None:
    """Do the same as `append` for a key that is already hashed. Checks nothing.

    Args:
        key: `[B, H_KV, 1, D]`.
        value: `[B, H_KV, 1, V]`.
        encoded: of the key, `[B, H_KV, 1, ...]`; None: codes, gain and error stay as they are.
        place: int64 `[1]`, the slot to write.
        slots: the buffers.
    """
    pairs: list[tuple[Tensor | None, Tensor]] = [(slots.keys, key), (slots.values, value)]
    if encoded is not None:
        pairs += [(slots.codes, encoded.codes), (slots.gain, encoded.gain), (slots.error, encoded.error)]
    for to, new in pairs:
        if to is not None:
            to.index_copy_(2, place, new)


def check(encoder: Encoder | None, key: Tensor, value: Tensor, place: Tensor, slots: Slots) -> None:
    """Raise `InputError` unless `append` accepts the arguments. Reads no tensor values, not to wait for a device.

    Args:
        encoder, key, value, place, slots: as in `append`.
    """
    for name, new, buffer in (("key", key, slots.keys), ("value", value, slots.values)):
        if buffer.dim() != 4 or new.shape != (*buffer.shape[:2], 1, buffer.shape[3]) or new.dtype != buffer.dtype:
            raise InputError(
                f"{name} {new.dtype} {list(new.shape)} does not fit its buffer {buffer.dtype} {list(buffer.shape)}"
            )
    if place.shape != (1,) or place.dtype.is_floating_point:
        raise InputError(f"place must be integers [1], not {place.dtype} {list(place.shape)}")
    if (encoder is None) != (slots.codes is None):
        raise InputError("append needs an encoder where there are codes, and none where there are not")
    if encoder is not None and slots.codes is not None:
        encoder.check(key)
        check_codes(slots.codes, encoder.bits)
    lead = slots.keys.shape[:3]
    for name, kept, dims, dtype in (
        ("codes", slots.codes, 4, torch.int64),
        ("gain", slots.gain, 3, torch.uint8),
        ("error", slots.error, 3, torch.float32),
    ):
        if kept is not None and (kept.dim() != dims or kept.shape[:3] != lead or kept.dtype != dtype):
            raise InputError(
                f"{name} {kept.dtype} {list(kept.shape)} does not fit the keys' buffer {list(slots.keys.shape)}"
            )
