"""The work folder of `bpc calibrate`: where it is, who may use it, and when it goes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bpc_cli.command import Terminated
from bpc_cli.console import note

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_calib.calibration.plan import Plan
    from bpc_calib.calibration.ranks import Ranks
    from bpc_calib.calibration.work_folder import WorkFolder


@dataclass(frozen=True)
class WorkOptions:
    """The folder that lets a stopped calibration go on."""

    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for finished samples and layers: after a stop, the same command goes on with them. "
            "Default: the output file's name with .work added."
        ),
    ] = None
    keep_work: Annotated[bool, typer.Option("--keep-work", help="Keep the work folder at the end.")] = False

    def folder(self, target: Path) -> Path:
        """The work folder of an output file."""
        return self.work_dir or Path(f"{target}.work")


def was_finished(target: Path, options: WorkOptions, plan: "Plan | None" = None, device: str = "cpu") -> bool:
    """Whether the work folder has the artifact that is the output file, so that only its removal is left.

    With a plan, also whether it is of this plan on this device.
    """
    from bpc_calib.calibration.work_folder import ARTIFACT, is_same_work

    if plan is not None:
        import torch

        if not is_same_work(options.folder(target), plan, torch.device(device)):
            return False
    kept = options.folder(target) / ARTIFACT
    try:
        return kept.read_bytes() == target.read_bytes()
    except OSError:
        return False


def finished(target: Path, options: WorkOptions, ranks: "Ranks") -> "ProjectionArtifact | None":
    """The output file if an earlier run has finished it; the other ranks learn by broadcast that nothing is left."""
    from bpc_artifacts import load

    if not was_finished(target, options):
        return None
    ranks.broadcast("work", None)
    return load(target)


def reused(target: Path, options: WorkOptions, work: "WorkFolder") -> dict[str, int]:
    """How many samples and layers earlier runs have finished."""
    if was_finished(target, options):
        return {"samples": work.plan.samples, "layers": len(work.plan.model.full_layers)}
    return {"samples": len(work.samples), "layers": len(work.layers)}


@contextmanager
def open_work(
    target: Path, options: WorkOptions, plan: "Plan", device: str, quiet: bool, ranks: "Ranks"
) -> "Iterator[WorkFolder]":
    """Lock the output file and its work folder; say what earlier runs have finished."""
    import torch

    from bpc_calib.calibration.durable import locked
    from bpc_calib.calibration.work_folder import open_work_folder
    from bpc_calib.errors import InputError

    folder, real = options.folder(target), Path(os.path.realpath(target))
    if Path(os.path.realpath(folder)) in real.parents:
        raise InputError(f"{target} is in the work folder {folder}, whose files are removed at the end: choose another")
    # A killed run leaves this file, unlocked: to lock the folder instead would stop runs of its other files.
    lock = real.with_name(f".{real.name}.lock")
    try:
        with (
            locked(lock, f"{target}: another run is writing this file: wait for it, or choose another output"),
            open_work_folder(folder, plan, torch.device(device), ranks) as work,
        ):
            done = reused(target, options, work)
            if any(done.values()) and not quiet:
                note(
                    f"Going on with {folder}: {done['samples']} of {plan.samples} samples and "
                    f"{done['layers']} of {len(plan.model.full_layers)} layers are finished"
                )
            yield work
    except (KeyboardInterrupt, Terminated):
        if folder.exists() and ranks.count == 1:  # several ranks end with one line: `joined_ranks`
            note(f"The finished work is in {folder}: the same command goes on with it")
        raise


def finish(artifact: "ProjectionArtifact", target: Path, work: "WorkFolder", *, overwrite: bool, keep: bool) -> None:
    """Write the artifact, then remove the work folder: one of them is always whole."""
    from bpc_artifacts import save
    from bpc_artifacts.file import ARTIFACT
    from bpc_artifacts.replacing import replacing
    from bpc_calib.calibration.durable import sync_folder
    from bpc_calib.calibration.work_folder import remove_work

    save(artifact, work.artifact, overwrite=True)
    with replacing(target, overwrite, ARTIFACT, locked=True) as temporary:
        temporary.write_bytes(work.artifact.read_bytes())
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
    sync_folder(Path(os.path.realpath(target)).parent)
    if not keep:
        remove_work(work.path)
