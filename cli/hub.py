"""`bpc push` and `bpc pull`: publish an artifact on the Hub with a model card, or download one to a file."""

import filecmp
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_calib.sharing.names import check_branch, check_repository
from bpc_cli.command import checked, command
from bpc_cli.console import fail, note, print_json, printable, quiet_libraries, size_text
from bpc_cli.opening import split_revision
from bpc_cli.options import AsJson
from bpc_cli.report import draw_residuals

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_calib.sharing.publishing import Target


@command
def push(
    *,
    file: Annotated[Path, typer.Argument(help="Artifact: a file that bpc calibrate wrote.")],
    repository: Annotated[
        str,
        typer.Argument(
            help="Model repository on the Hub, ORG/NAME; it is made if it does not exist.",
            callback=checked(check_repository),
        ),
    ],
    evaluation: Annotated[
        Path | None, typer.Option(help="Result of bpc eval -o with this artifact: the card shows its figures.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str,
        typer.Option(help="Branch to publish on; it is made if it does not exist.", callback=checked(check_branch)),
    ] = "main",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Publish without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Publish projections on the Hub.

    A model card goes with them, and a question comes first. Local paths are not published: a local model becomes the
    last part of its path, and a local text its name.

    Example: bpc push Qwen3-8B-bpc64.safetensors alice/Qwen3-8B-bpc64
    """
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise typer.BadParameter("publishing asks first, and there is no terminal: --yes publishes without asking")
    quiet_libraries()
    from huggingface_hub import constants

    from bpc_artifacts import ArtifactError, load
    from bpc_artifacts.publishing import publishable
    from bpc_calib.sharing.card import publishable_result
    from bpc_calib.sharing.publishing import look_up, publish

    found = load(file)
    measured = None if evaluation is None else publishable_result(evaluation, found)
    try:
        artifact, changed = publishable(found)
    except ArtifactError as fault:
        fail(f"{file}: {fault}")
    name = f"{repository.split('/')[-1]}.safetensors"
    target = look_up(repository, branch=revision, private=private, filename=name)
    files = _files(artifact, name, target.reference, measured)
    _show(target, files, artifact, changed)
    if not yes and not typer.confirm("Publish?", err=True):
        note("Nothing was published.")
        raise typer.Exit(1)
    commit = publish(target, files)
    if as_json:
        print_json(_result(target, files, commit, changed))
        return
    new = target.commit is None or target.new_branch
    what = "Published" if new else "Unchanged" if target.unchanged(commit) else "Updated"
    print(f"{what}: {constants.ENDPOINT}/{repository} at commit {commit}")
    print(f"Use it with -a {target.reference}, or pinned with -a {repository}@{commit}")


def _files(
    artifact: "ProjectionArtifact", name: str, reference: str, measured: dict[str, Any] | None
) -> dict[str, bytes]:
    """What is published: the artifact, the pictures if matplotlib is there, and the card."""
    from bpc_artifacts import save
    from bpc_calib.sharing.card import model_card

    with TemporaryDirectory() as folder:
        save(artifact, Path(folder, name))
        files = {name: Path(folder, name).read_bytes()}
        pictures = _draw(artifact, measured, Path(folder))
        files |= {path.name: path.read_bytes() for path in pictures}
    card = model_card(artifact, reference, evaluation=measured, pictures=[path.name for path in pictures])
    return files | {"README.md": card.encode()}


def _draw(artifact: "ProjectionArtifact", measured: dict[str, Any] | None, folder: Path) -> list[Path]:
    """The pictures of the residuals and of the quality by budget; none without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    from bpc_calib.evaluation import pictures
    from bpc_calib.sharing.card import BUDGETS, RESIDUALS

    residuals = folder / RESIDUALS
    draw_residuals(artifact, residuals, force=False)
    drawn = [] if measured is None else pictures.draw(measured["rows"], folder / "quality")
    return [residuals, *(path for path in drawn if path.name == BUDGETS)]


def _show(target: "Target", files: dict[str, bytes], artifact: "ProjectionArtifact", changed: list[str]) -> None:
    """Say on stderr what goes where, and which names anyone can read then."""
    state = "a new repository" if target.commit is None else "exists: files of these names are replaced"
    note(f"Repository: {target.repository} ({'private' if target.private else 'public'}, {state})")
    note(f"Branch: {target.branch}{' (new)' if target.new_branch else ''}")
    note(f"Files: {', '.join(f'{name} ({size_text(len(data))})' for name, data in files.items())}")
    metadata = artifact.metadata
    names = [source["name"] for source in metadata["calibration"]["sources"]]
    note(f"Names in them: model {metadata['model']['id']}, text {', '.join(names)}")
    if changed:
        note(f"Local paths are left out: only these names are published ({', '.join(changed)})")


def _result(target: "Target", files: dict[str, bytes], commit: str, changed: list[str]) -> dict[str, Any]:
    return {
        "repository": target.repository,
        "branch": target.branch,
        "commit": commit,
        "pinned": f"{target.repository}@{commit}",
        "private": target.private,
        "created": target.commit is None,
        "unchanged": target.unchanged(commit),
        "files": {name: len(data) for name, data in files.items()},
        "shortened": changed,
    }


@command
def pull(
    *,
    repository: Annotated[
        str, typer.Argument(help="Artifact on the Hub: ORG/NAME, ORG/NAME/FILE or ORG/NAME@REVISION.")
    ],
    output: Annotated[
        str | None,  # a Path would lose the last slash
        typer.Option("--output", "-o", metavar="PATH", help="File or folder to write to. Default: this folder."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: main.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another artifact of the same name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Get projections from the Hub.

    They are checked and written to a file.

    Example: bpc pull alice/Qwen3-8B-bpc64
    """
    name, wanted = split_revision(repository, revision)
    parts = name.split("/")
    if len(parts) < 2:
        raise typer.BadParameter(f"{name}: expected an artifact on the Hub, as ORG/NAME")
    quiet_libraries()
    from bpc_artifacts import ArtifactError, load
    from bpc_artifacts.file import ARTIFACT
    from bpc_artifacts.replacing import replacing
    from bpc_calib.hub import fetch_artifact

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
