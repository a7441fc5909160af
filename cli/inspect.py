"""`bpc inspect`: what is in an artifact, whether it is whole, and whether it fits a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_cli.artifact_tables import print_artifact
from bpc_cli.command import command
from bpc_cli.console import note, print_json, printable
from bpc_cli.find_artifact import find_artifact
from bpc_cli.libraries import quiet_libraries
from bpc_cli.residual_plot import draw_residuals

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact


@command
def inspect(
    *,
    file: Annotated[
        str, typer.Argument(help="Artifact: a file, or a Hub id, ORG/NAME, ORG/NAME/FILE or ORG/NAME@REVISION.")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Check that the artifact fits this model: a folder, a Hub id or demo."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="File for a picture of the residuals: .png, .svg or .pdf (needs matplotlib)."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the artifact on the Hub.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the picture if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything except the projections as JSON.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Check a projection artifact and show what is in it, how it was made and how well it fits its keys."""
    quiet_libraries()
    from bpc_artifacts import check_model, load

    path, commit = find_artifact(file, revision)
    artifact = load(path)
    doubts = None
    if model is not None:
        from bpc_calib.models.description import describe
        from bpc_calib.models.loading import load_config

        config, model_commit = load_config(model, trust_remote_code=trust_remote_code)
        doubts = check_model(artifact, describe(config, revision=model_commit).metadata())
        for doubt in doubts:
            note(f"Warning: {doubt}")
    if plot is not None:
        draw_residuals(artifact, plot, force)
    if as_json:
        fit = {} if model is None else {"model": model, "fits": True, "warnings": doubts}
        print_json(_facts(artifact, path, commit, fit))
        return
    print_artifact(artifact, file, commit)
    if model is not None:
        print(f"Fits {printable(model)}.")
    if plot is not None:
        print(f"Wrote {printable(plot)}")


def _facts(artifact: "ProjectionArtifact", path: Path, commit: str | None, fit: dict[str, Any]) -> dict[str, Any]:
    from bpc_artifacts import verdict

    return {
        "file": str(path),
        "commit": commit,
        "bytes": path.stat().st_size,
        "valid": True,
        **fit,
        "metadata": dict(artifact.metadata),
        "tensors": {name: list(array.shape) for name, array in artifact.tensors().items()},
        "residual": {str(index): layer.residual.tolist() for index, layer in artifact.layers.items()},
        "verdict": verdict(artifact),
    }
