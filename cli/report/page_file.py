"""Writing a page: in one step, and never over anything but a page of this command."""

from pathlib import Path
from typing import TYPE_CHECKING

from bpc_cli.report.parts import GENERATOR

if TYPE_CHECKING:
    from bpc_artifacts.replacing import Kind

__all__ = ["check_page", "write_page"]

_BYTES = 1 << 20  # about the size of a page of the largest model


def check_page(path: Path, force: bool) -> None:
    """Raise `ArtifactError` if a page cannot be written to this path."""
    from bpc_artifacts.replacing import try_replacing

    try_replacing(path, _BYTES, force, _kind())


def write_page(path: Path, page: str, force: bool) -> None:
    """Write a page. Raises `ArtifactError`."""
    from bpc_artifacts.replacing import replacing

    with replacing(path, force, _kind()) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _kind() -> "Kind":
    from bpc_artifacts.replacing import Kind

    return Kind("a page of bpc inspect", _is_page)


def _is_page(path: Path) -> bool:
    with open(path, "rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(1024)
