"""Where compiled kernels are kept: a folder that nobody but the user can write, since numba's files are pickles."""

import hashlib
import os
import stat
from pathlib import Path

from bpc_calib.method import encoded, scoring

__all__ = ["kernel_folder", "stamp"]


def stamp() -> str:
    """Of the sources that kernels are compiled from: what was compiled from others is stale."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    sources += [Path(str(module.__file__)) for module in (encoded, scoring)]  # `constants` are theirs
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in sources)).hexdigest()[:16]


def kernel_folder() -> Path | None:
    """The folder for kernels of these sources, mode 0700; None where no folder can be the user's alone.

    `NUMBA_CACHE_DIR` names another place than the user's cache folder.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get("NUMBA_CACHE_DIR")
    above = (Path(named) if named else Path(home, "bpc")).expanduser() / "bpc-numba"
    try:
        above.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = above.lstat()
        if not stat.S_ISDIR(found.st_mode) or (os.name == "posix" and _others_write(found)):
            return None
        folder = above / stamp()
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):  # not writable, or no home
        return None
    return folder


def _others_write(found: os.stat_result) -> bool:
    return found.st_uid != os.getuid() or bool(found.st_mode & 0o077)
