"""Packages that only some models need."""

from collections.abc import Iterable
from importlib.util import find_spec

from bpc_calib.errors import ModelError

__all__ = ["require"]


def require(what: str, extra: str, packages: Iterable[str]) -> None:
    """Raise `ModelError` unless these packages are installed; it names the extra that brings them."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ModelError(f"{what} needs {' and '.join(missing)}: pip install 'bpc-calib[{extra}]'")
