"""The packages that only some features need: the extras of pyproject.toml, from the metadata of the installation.

A command to install them names the packages themselves. `pip install 'bpc-calib[EXTRA]'` would fail in a checkout where
no index has bpc-calib, and `pip install '.[EXTRA]'` anywhere else.
"""

import shlex
from collections.abc import Iterator
from importlib.metadata import requires
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["PROJECT", "install", "lacking", "requirements"]

PROJECT = "bpc-calib"


def requirements(extra: str) -> "Iterator[Requirement]":
    """Yield what an extra adds, with the extras that it includes; of no extra (""), what BPC always needs.

    Raises:
        PackageNotFoundError: BPC is not installed as a package.
    """
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requires(PROJECT) or []):
        marker = requirement.marker
        always, wanted = (marker is None or marker.evaluate({"extra": each}) for each in ("", extra))
        if not wanted or (extra and always):
            continue
        if requirement.name == PROJECT:
            for included in requirement.extras:
                yield from requirements(included)
            continue
        requirement.marker = None
        yield requirement


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return shlex.join(["pip", "install", *map(str, requirements(extra))])


def lacking(extra: str, *modules: str) -> str | None:
    """Return which of these modules of an extra are not installed, and the command that gets them; None: all are."""
    missing = [module for module in modules if find_spec(module) is None]
    return f"{' and '.join(missing)}: {install(extra)}" if missing else None
