"""`bpc pull`: download an artifact from the Hub to a file."""

import filecmp
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from bpc_cli.command import command
from bpc_cli.console import fail, print_json, printable
from bpc_cli.find_artifact import split_revision
from bpc_cli.libraries import quiet_libraries
from bpc_cli.options import AsJson


@command
def pull(
    *,
    repository: Annotated[
        str, typer.Argument(help="Artifact on the Hub: ORG/NAME, ORG/NAME/FILE or ORG/NAME@REVISION.")
    ],
    output: Annotated[
        str | None,  # a Path would lose the last slash
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File or folder to write to. Default: this folder.",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: main.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another artifact of the same name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download projections from the Hub, check them, and write them to a file.

    Example: bpc pull alice/Llama-3.1-8B-Instruct-bpc64
    """
    quiet_libraries()
    from bpc_artifacts import ArtifactError, load
    from bpc_artifacts.file import ARTIFACT
    from bpc_artifacts.replacing import replacing
    from bpc_calib.hub import fetch_artifact

    name, wanted = split_revision(repository, revision)
    parts = name.split("/")
    if len(parts) < 2:
        fail(f"{name}: expected an artifact on the Hub, as ORG/NAME")
    place = Path(output or "")
    in_folder = os.path.isdir(place)
    if output is not None and output.endswith(("/", "/.")) and not in_folder:
        fail(f"{output}: is a file, not a folder" if place.is_file() else f"{output}: make this folder first")
    if not in_folder or len(parts) > 2:
        _check(place / parts[-1] if in_folder else place, force)
    found, commit = fetch_artifact(name, wanted)
    try:
        load(found)
    except ArtifactError as fault:
        fail(f"{name} at {commit}: {str(fault).removeprefix(f'{found}: ')}")
    target = place / found.name if in_folder else place
    there = False
    with suppress(OSError):  # it cannot be read
        there = os.path.isfile(target) and filecmp.cmp(found, target, shallow=False)
    if not there:
        with replacing(target, force, ARTIFACT) as temporary:
            shutil.copyfile(found, temporary)
    pinned = f"{name}@{commit}"
    if as_json:
        print_json({"output": str(target), "commit": commit, "pinned": pinned, "unchanged": there})
        return
    print(f"{printable(target)} {'is already this file' if there else 'written'}: {name} at commit {commit}")
    print(f"To use this commit from the Hub: -a {pinned}")


def _check(target: Path, force: bool) -> None:
    """Refuse a target before the download; an artifact that is there may be the same one, so it is compared later."""
    from bpc_artifacts import check_writable
    from bpc_artifacts.file import ARTIFACT

    there = False
    with suppress(OSError):  # it cannot be read
        there = os.path.isfile(target) and ARTIFACT.holds(target)
    if not there:
        check_writable(target, 0, overwrite=force)
