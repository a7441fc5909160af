"""An artifact as tables: its facts, its text, its residuals."""

from typing import TYPE_CHECKING

from bpc_cli.console import print_rows, print_table, printable
from bpc_cli.residual import residual_title

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["print_artifact"]

MOST_HEADS = 8  # columns of the table; the picture shows every head


def print_artifact(artifact: "ProjectionArtifact", file: str, commit: str | None) -> None:
    """Print all tables of an artifact that `file` names, and that is at `commit` on the Hub, and the verdict."""
    from bpc_artifacts import verdict

    _print_facts(artifact, file, commit)
    _print_text(artifact)
    _print_residuals(artifact)
    for sentence in verdict(artifact):
        print(sentence)


def _print_facts(artifact: "ProjectionArtifact", file: str, commit: str | None) -> None:
    from bpc_artifacts.schema import codes_of

    metadata = artifact.metadata
    algorithm, model, calibration = metadata["algorithm"], metadata["model"], metadata["calibration"]
    extras = [name for name, on in (("query metric", algorithm["metric"]), ("centred", algorithm["centred"])) if on]
    if algorithm["least_squares"]:
        extras.append(f"{algorithm['least_squares']} least-squares rounds")
    codes = codes_of(metadata)
    steps = f"{algorithm['iterations']} {'steps per bit' if codes == 'signs' else 'rounds of k-means'}"
    rows = {
        "file": f"{file}{f' at {commit}' if commit else ''}",
        "format": f"version {metadata['format_version']}, written by bpc {metadata['bpc_version']}, checks passed",
        "model": f"{model['id']}{' at ' + model['revision'] if model['revision'] else ''} ({model['model_type']})",
        "layers": f"{len(artifact.layers)} of {model['num_layers']} (full attention)",
        "heads": f"{model['kv_heads']} KV heads of {model['head_dim']}, {model['query_heads']} query heads",
        "RoPE": model["rope"] or "none",
        "method": ", ".join([f"{algorithm['name']}, {steps}", *extras]),
        "codes": f"{codes}, {algorithm['bits']} bits per key",
        "position shift": "on" if algorithm["position_shift"] else "off",
        "seed": algorithm["seed"],
        "calibration": f"{calibration['samples']} samples of {calibration['sequence_length']:,} tokens, "
        f"{calibration['keys_per_head']:,} keys per KV head, {calibration['dtype']}",
    }
    print_rows("Artifact", rows)


def _print_text(artifact: "ProjectionArtifact") -> None:
    from rich.table import Table

    table = Table("source", "path", "revision", "samples", "tokens")
    for source in artifact.metadata["calibration"]["sources"]:
        revision = source["revision"][:12] if source["revision"] else "local"
        numbers = (str(source["samples"]), f"{source['tokens']:,}")
        table.add_row(*map(printable, (source["name"], source["path"], revision, *numbers)))
    print_table("Text", table)


def _print_residuals(artifact: "ProjectionArtifact") -> None:
    from rich.table import Table

    algorithm, kv_heads = artifact.metadata["algorithm"], artifact.metadata["model"]["kv_heads"]
    held_out = artifact.metadata["metrics"].get("held_out")
    heads = list(range(kv_heads)) if kv_heads <= MOST_HEADS else []
    new = [] if held_out is None else ["new text"]
    table = Table("layer", "mean", *new, "min", "max", *(f"head {head}" for head in heads))
    for index, layer in artifact.layers.items():
        last = layer.residual[:, -1]
        other = [] if held_out is None else [held_out["residual_by_layer"][str(index)]]
        cells = [last.mean(), *other, last.min(), last.max(), *(last[head] for head in heads)]
        table.add_row(str(index), *(f"{value:.3f}" for value in cells))
    print_table(f"{residual_title(algorithm)}, after {algorithm['bits']} bits", table)
