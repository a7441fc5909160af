"""Where keys and values are kept, as users name it. Importing this file is cheap: commands check with it."""

from pathlib import Path

from bpc_calib.errors import InputError

__all__ = ["kv_folder"]

DISK = "disk:"


def kv_folder(kv_device: str | None) -> Path | None:
    """Return the folder of `disk:FOLDER`; None for None: keys and values stay in the memory of the model's device.

    Raises:
        InputError: it names no folder.
    """
    if kv_device is None:
        return None
    if not isinstance(kv_device, str) or not kv_device.startswith(DISK) or kv_device == DISK:
        raise InputError(f"kv_device must be disk:FOLDER, the folder for files of keys and values, not {kv_device!r}")
    return Path(kv_device.removeprefix(DISK)).expanduser()
