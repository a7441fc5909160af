"""`bpc inspect`: what is in an artifact, whether it is whole, and whether it fits a model."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_cli.arguments import find_artifact
from bpc_cli.console import command, fail, note, print_json, print_table, printable, quiet_libraries, residual_title

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

MOST_HEADS = 8  # columns of the table; the picture shows more


@command
def inspect(
    file: Annotated[str, typer.Argument(help="Artifact file, or a Hub id: ORG/NAME or ORG/NAME/FILE.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Say whether it fits this model (folder or Hub id).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the residuals to this .png, .svg or .pdf (extra: plots).")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the artifact on the Hub.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the plot if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything but the projections as JSON.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
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
        _plot(artifact, plot, force)
    if as_json:
        print_json(_as_table(artifact, path, commit, model, doubts))
        return
    _print(artifact, file, commit)
    if model is not None:
        print(f"Fits {printable(model)}.")
    if plot is not None:
        print(f"Wrote {printable(plot)}")


def _as_table(
    artifact: "ProjectionArtifact",
    path: Path,
    commit: str | None,
    model: str | None,
    doubts: list[str] | None,
) -> dict[str, Any]:
    table: dict[str, Any] = {"file": str(path), "commit": commit, "bytes": path.stat().st_size, "valid": True}
    if model is not None:
        table |= {"model": model, "fits": True, "warnings": doubts}
    tensors = {name: list(array.shape) for name, array in artifact.tensors().items()}
    residual = {str(index): layer.residual.tolist() for index, layer in artifact.layers.items()}
    return table | {"metadata": dict(artifact.metadata), "tensors": tensors, "residual": residual}


def _print(artifact: "ProjectionArtifact", file: str, commit: str | None) -> None:
    from rich.table import Table

    metadata = artifact.metadata
    algorithm, model, calibration = metadata["algorithm"], metadata["model"], metadata["calibration"]
    extras = [name for name, on in (("query metric", algorithm["metric"]), ("centred", algorithm["centred"])) if on]
    if algorithm["least_squares"]:
        extras.append(f"{algorithm['least_squares']} least-squares rounds")
    facts = Table(show_header=False)
    for name, value in {
        "file": f"{file}{f' at {commit}' if commit else ''}",
        "format": f"version {metadata['format_version']}, written by bpc {metadata['bpc_version']}, checks passed",
        "model": f"{model['id']}{' at ' + model['revision'] if model['revision'] else ''} ({model['model_type']})",
        "layers": f"{len(artifact.layers)} of {model['num_layers']} (full attention)",
        "heads": f"{model['kv_heads']} KV heads of {model['head_dim']}, {model['query_heads']} query heads",
        "RoPE": model["rope"] or "none",
        "method": ", ".join([f"{algorithm['name']}, {algorithm['iterations']} steps a bit", *extras]),
        "codes": f"{algorithm['bits']} bits a key",
        "position shift": "on" if algorithm["position_shift"] else "off",
        "seed": algorithm["seed"],
        "calibration": f"{calibration['samples']} samples of {calibration['sequence_length']:,} tokens, "
        f"{calibration['keys_per_head']:,} keys a KV head, {calibration['dtype']}",
    }.items():
        facts.add_row(name, printable(value))
    print_table("Artifact", facts)

    sources = Table("source", "path", "revision", "samples", "tokens")
    for source in calibration["sources"]:
        revision = source["revision"][:12] if source["revision"] else "local"
        numbers = (str(source["samples"]), f"{source['tokens']:,}")
        sources.add_row(*map(printable, (source["name"], source["path"], revision, *numbers)))
    print_table("Text", sources)

    heads = list(range(model["kv_heads"])) if model["kv_heads"] <= MOST_HEADS else []
    residual = Table("layer", "mean", "min", "max", *(f"head {head}" for head in heads))
    for index, layer in artifact.layers.items():
        last = layer.residual[:, -1]
        cells = [last.mean(), last.min(), last.max(), *(last[head] for head in heads)]
        residual.add_row(str(index), *(f"{value:.3f}" for value in cells))
    print_table(f"{residual_title(algorithm)}, after {algorithm['bits']} bits", residual)


def _plot(artifact: "ProjectionArtifact", path: Path, force: bool) -> None:
    """Residual against bits, a line a layer, and the last residual of every layer and head."""
    try:
        import matplotlib
    except ImportError:
        fail("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("agg")
    import numpy as np
    from matplotlib import pyplot

    from bpc_artifacts.file import replacing

    known = (".png", ".svg", ".pdf")
    if path.suffix.lower() not in known:
        fail(f"{path}: pictures are {', '.join(known)}")
    layers = list(artifact.layers)
    residual = np.stack([layer.residual for layer in artifact.layers.values()])  # [layers, heads, bits + 1]
    figure, (curves, heatmap) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    colors = pyplot.get_cmap("viridis")(np.linspace(0, 1, len(layers)))
    for values, layer, color in zip(residual.mean(axis=1), layers, colors, strict=True):
        curves.plot(values, color=color, label=f"layer {layer}")
    curves.set(xlabel="bits", ylabel="|K - UP| / |K|, mean over KV heads", ylim=(0, 1))
    curves.set_title("Residual by bits", parse_math=False)
    curves.legend(fontsize="small", ncols=1 + len(layers) // 12)
    picture = heatmap.imshow(residual[:, :, -1], aspect="auto", cmap="viridis", interpolation="nearest")
    heatmap.set(xlabel="KV head", ylabel="layer")
    heatmap.set_title(f"Residual after {residual.shape[2] - 1} bits", parse_math=False)
    heatmap.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize="small")
    heatmap.set_xticks(range(residual.shape[1]))
    figure.colorbar(picture, ax=heatmap)
    figure.suptitle(printable(artifact.metadata["model"]["id"]), parse_math=False)
    with replacing(path, force) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in letters that the font lacks
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)
