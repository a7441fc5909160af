"""Keys and values of a layer in a memory-mapped file, for contexts larger than main memory.

The file has no name, so nothing is left of it when the process ends, however that ends. It has addresses for as many
tokens as the model takes, and disk blocks for those that came; so it grows without a copy. Blocks are taken before they
are written: where the disk is full, writing to a mapped page without a block would kill the process.
"""

import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bpc_calib.errors import InputError

__all__ = ["TokenFile", "check_folder", "with_room"]

TAKEN_AT_ONCE = 1024  # tokens


class TokenFile:
    """Room for the keys and values of a layer, `[batch, kv_heads, room, head_dim]` each.

    Those of a token lie side by side, so that a page that is read for the key has the value, too.
    """

    def __init__(self, folder: Path, shape: Sequence[int], dtype: torch.dtype) -> None:
        batch, heads, tokens, dim = shape
        self.folder, self.taken = folder, 0  # tokens that have disk blocks
        self.room = -(-tokens // TAKEN_AT_ONCE) * TAKEN_AT_ONCE
        self.token = 2 * dim * dtype.itemsize  # bytes
        shape = (batch, heads, self.room, 2, dim)
        size = math.prod(shape) * dtype.itemsize
        with _in_words(folder, tokens, 0):
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            weakref.finalize(self, self.file.close)  # it lives as long as this object
            self.file.truncate(size)
            self.mapping = mmap.mmap(self.file.fileno(), size)
        with torch.inference_mode(False):  # so that steps outside of inference mode may write
            self.pairs = torch.frombuffer(self.mapping, dtype=dtype).view(shape)
            self.keys, self.values = self.pairs[:, :, :, 0], self.pairs[:, :, :, 1]

    def take(self, tokens: int) -> None:
        """Take disk blocks for the first tokens.

        Raises:
            InputError: the disk is full; what the file holds is as before.
        """
        if tokens <= self.taken:
            return
        upto = -(-tokens // TAKEN_AT_ONCE) * TAKEN_AT_ONCE
        rows, count = self.pairs.shape[:2].numel(), (upto - self.taken) * self.token
        with _in_words(self.folder, tokens, rows * count):
            for row in range(rows):
                os.posix_fallocate(self.file.fileno(), (row * self.room + self.taken) * self.token, count)
        self.taken = upto

    def copied(self, sequences: Sequence[int], length: int) -> "TokenFile":
        """Return a file with the first tokens of these sequences.

        Raises:
            InputError: the disk is full.
        """
        _, heads, room, dim = self.keys.shape
        other = TokenFile(self.folder, (len(sequences), heads, room, dim), self.keys.dtype)
        other.take(length)
        for place, sequence in enumerate(sequences):
            other.pairs[place, :, :length] = self.pairs[sequence, :, :length]
        return other


def with_room(file: TokenFile | None, folder: Path, keys: Tensor, length: int, limit: int) -> TokenFile:
    """Return the file, or a larger copy, with disk blocks for new tokens after the first `length`.

    Args:
        file: None: no file yet.
        folder: of a new file.
        keys: the new keys, `[batch, kv_heads, new, head_dim]`.
        length: tokens in the file.
        limit: tokens that the model takes.

    Raises:
        InputError: the disk is full, or the keys are not on a CPU; the file is as before.
    """
    batch, heads, new, dim = keys.shape
    if keys.device.type != "cpu":
        raise InputError(f"kv_device=disk:{folder} serves models on a CPU, and the keys are on {keys.device}")
    needed = length + new
    if file is not None and needed <= file.room:
        file.take(needed)
        return file
    larger = TokenFile(folder, (batch, heads, limit if needed <= limit else 2 * needed, dim), keys.dtype)
    larger.take(needed)
    if file is not None:
        larger.pairs[:, :, :length] = file.pairs[:, :, :length]
    return larger


def check_folder(folder: Path) -> None:
    """Raise `InputError` unless files can be kept in the folder, without a name and with their disk blocks taken."""
    if not hasattr(os, "posix_fallocate"):
        raise InputError(f"kv_device=disk:{folder}: this system cannot take disk space beforehand, as Linux can")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as fault:
        raise InputError(f"kv_device=disk:{folder}: no file can be made there: {fault.strerror}") from fault


@contextmanager
def _in_words(folder: Path, tokens: int, needed: int) -> Iterator[None]:
    """Say of a system error how much is needed and free."""
    try:
        yield
    except OSError as fault:
        free = shutil.disk_usage(folder).free
        raise InputError(
            f"{folder} has no room for keys and values of {tokens:,} tokens ({fault.strerror}): each layer needs "
            f"{needed / 1e6:,.1f} MB more, and {free / 1e6:,.1f} MB are free; free some, or take another folder"
        ) from fault
