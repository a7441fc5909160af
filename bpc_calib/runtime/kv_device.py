"""Where keys and values are kept, as users name it. Importing this file is cheap: commands check with it."""

from dataclasses import dataclass
from pathlib import Path

from bpc_calib.errors import InputError

__all__ = ["KVPlace", "kv_place"]

MEMORY, DISK = "cpu", "disk:"


@dataclass(frozen=True)
class KVPlace:
    """A place for keys and values that the CPU reads, wherever the model is."""

    folder: Path | None  # of memory-mapped files; None: main memory


def kv_place(kv_device: str | None) -> KVPlace | None:
    """Return the place of `cpu` or `disk:FOLDER`; None for None: keys and values lie where the model is.

    Raises:
        InputError: it names no place.
    """
    if kv_device is None:
        return None
    if kv_device == MEMORY:
        return KVPlace(None)
    if not isinstance(kv_device, str) or not kv_device.startswith(DISK) or kv_device == DISK:
        raise InputError(
            f"kv_device must be cpu, main memory, or disk:FOLDER, a folder for files of keys and values, "
            f"not {kv_device!r}"
        )
    return KVPlace(Path(kv_device.removeprefix(DISK)).expanduser())
