"""`bpc inspect`: what is in an artifact, whether it is whole, whether it fits a model, and how two of them differ."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_artifacts.replacing import check_picture_name
from bpc_calib.method.defaults import BUDGET
from bpc_cli.artifact_tables import MOST_HEADS, Inspected, compare_artifacts, print_artifact, print_comparison
from bpc_cli.command import checked, command
from bpc_cli.console import fail, note, print_json, printable, quiet_libraries
from bpc_cli.eval_tables import print_evaluation
from bpc_cli.opening import find_artifact
from bpc_cli.options import TrustRemoteCode, parse_budget
from bpc_cli.report import check_page, draw_residuals, write_page
from bpc_cli.share_tables import SharedOut, print_shares, shared_out

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact


def parse_share(text: str) -> float:
    """The budget of `--budget 2%`, which must be a share."""
    share = parse_budget(text)
    if isinstance(share, int):
        raise typer.BadParameter(f"{text}: expected a share of the tokens, such as 2%")
    return share


@command
def inspect(
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            help="Artifact: a file, or a Hub id, ORG/NAME, ORG/NAME/FILE or "
            "ORG/NAME@REVISION. Two artifacts are compared.",
            metavar="FILE [FILE]",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Check that the artifact fits this model: a folder, a Hub id or demo."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="File for a page with pictures, for any browser; it loads nothing (needs matplotlib)."),
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(help="Show also this result of bpc eval --output with the artifact. Once for each artifact."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="File for a picture of the residuals and of the shares by head: .png, .svg or .pdf (needs "
            "matplotlib).",
            callback=checked(check_picture_name),
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Share of the tokens for which to show what each KV head gets, in a file that has what each needs.",
            metavar="SHARE",
            callback=checked(parse_share),
        ),
    ] = f"{100 * BUDGET:g}%",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the artifact on the Hub.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the picture or the page if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything except the projections as JSON.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check, show or compare projection files.

    With one file, show what is in it, how it was made and how well it fits its keys. With two artifacts, show what
    differs in how they were made, and their residuals side by side.
    """
    if len(files) > 2:
        raise typer.BadParameter(f"{len(files)} artifacts given: bpc inspect shows one or compares two")
    if len(files) == 2 and plot is not None:
        raise typer.BadParameter("--plot draws one artifact: use --html to compare two")
    if evaluation and len(evaluation) != len(files):
        raise typer.BadParameter(f"{len(evaluation)} --evaluation for {len(files)} artifacts: one for each, in order")
    if plot is not None and html is not None and plot.resolve() == html.resolve():
        raise typer.BadParameter(f"{html} is given for --html and for --plot: give two files")
    quiet_libraries()
    _check_outputs(plot, html, force)
    found = _read(files, evaluation or [], revision, parse_share(budget))
    fits = [{} if model is None else _fit(each.artifact, model, trust_remote_code) for each in found]
    if plot is not None:
        draw_residuals(found[0].artifact, plot, force, found[0].shares)
    if html is not None:
        write_page(found, html, force)
    if as_json:
        tables = [_facts(each, fit) for each, fit in zip(found, fits, strict=True)]
        if len(found) == 1:
            print_json(tables[0])
        else:
            compared = vars(compare_artifacts(found[0].artifact, found[1].artifact))
            shown = {name: value for name, value in compared.items() if name != "same"}
            print_json({"artifacts": tables, "comparison": shown})
        return
    if len(found) == 1:
        print_artifact(found[0].artifact, found[0].name, found[0].commit)
        if found[0].shares is not None:
            print_shares(found[0].shares, MOST_HEADS)
    else:
        print_comparison(found[0], found[1])
    for each in found:
        if each.evaluation is not None:
            print_evaluation(each.evaluation)
    if model is not None:
        print(f"Fits {printable(model)}." if len(found) == 1 else f"Both fit {printable(model)}.")
    for path in (plot, html):
        if path is not None:
            print(f"Wrote {printable(path)}")


def _check_outputs(plot: Path | None, html: Path | None, force: bool) -> None:
    """Fail before anything is read if one of the files cannot be written: else the other would be left behind."""
    from bpc_artifacts.replacing import check_picture
    from bpc_calib.extras import lacking

    for option, file in (("--plot", plot), ("--html", html)):
        if file is not None and (lacks := lacking("plots", "matplotlib")):
            fail(f"{option} needs {lacks}")
    if plot is not None:
        check_picture(plot, force)
    if html is not None:
        check_page(html, force)


def _read(files: list[str], evaluations: list[Path], revision: str | None, budget: float) -> list[Inspected]:
    from bpc_artifacts import load
    from bpc_calib.evaluation.saved_result import read_result

    found = []
    for number, name in enumerate(files):
        path, commit = find_artifact(name, revision)
        artifact = load(path)
        result = read_result(evaluations[number], artifact) if evaluations else None
        found.append(Inspected(name, path, commit, artifact, shared_out(artifact, budget), result))
    return found


def _fit(artifact: "ProjectionArtifact", model: str, trust_remote_code: bool) -> dict[str, Any]:
    from bpc_artifacts import check_model
    from bpc_calib.models.description import describe
    from bpc_calib.models.loading import load_config

    config, commit = load_config(model, trust_remote_code=trust_remote_code)
    doubts = check_model(artifact, describe(config, revision=commit).metadata())
    for doubt in doubts:
        note(f"Warning: {doubt}")
    return {"model": model, "fits": True, "warnings": doubts}


def _facts(each: Inspected, fit: dict[str, Any]) -> dict[str, Any]:
    from bpc_artifacts import verdict

    artifact = each.artifact
    return {
        "file": str(each.path),
        "commit": each.commit,
        "bytes": each.path.stat().st_size,
        "valid": True,
        **fit,
        "metadata": dict(artifact.metadata),
        "tensors": {name: list(array.shape) for name, array in artifact.tensors().items()},
        "residual": {str(index): layer.residual.tolist() for index, layer in artifact.layers.items()},
        "verdict": verdict(artifact),
        **({} if each.shares is None else _needs(artifact, each.shares)),
        **({} if each.evaluation is None else {"evaluation": each.evaluation}),
    }


def _needs(artifact: "ProjectionArtifact", shares: SharedOut) -> dict[str, Any]:
    names = ("budget", "by_need", "equal_shares")

    def need(name: str) -> dict[str, Any]:
        return {str(index): found.tolist() for index, found in artifact.by_layer(name).items()}

    # json writes the layers' indices as text
    return {
        "need": need("need"),
        "need_short": need("need_short") or None,
        "shares": {
            "budget": shares.budget,
            "by_head": shares.by_head,
            "by_head_short": shares.by_head_short,
            "losses": [dict(zip(names, row, strict=True)) for row in shares.losses],
        },
    }
