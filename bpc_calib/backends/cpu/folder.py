"""Where compiled kernels are kept: a folder that nobody but the user can write, since numba's files are pickles."""

import hashlib
import os
import stat
from pathlib import Path

__all__ = ["kept", "stamp"]


def stamp() -> str:
    """Of the sources of this package: kernels compiled from others are not loaded."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in sources)).hexdigest()[:16]


def kept() -> Path | None:
    """The folder of these sources, mode 0700; None where there can be none that is the user's alone.

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
