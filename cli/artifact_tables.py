"""An artifact as tables: its facts, its text, its residuals."""

from typing import TYPE_CHECKING

from bpc_cli.console import print_rows, print_table, print_text_table, printable
from bpc_cli.quantities import heads_text
from bpc_cli.residual import new_text_residuals, residual_title
from bpc_cli.text_table import TextTable

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["artifact_facts", "print_artifact", "residual_rows"]

MOST_HEADS = 8  # columns of the table; the picture and the page show every head


def print_artifact(artifact: "ProjectionArtifact", file: str, commit: str | None) -> None:
    """Print all tables of an artifact that `file` names, and that is at `commit` on the Hub, and the verdict."""
    from bpc_artifacts import verdict

    print_rows("Artifact", {"file": f"{file}{f' at {commit}' if commit else ''}"} | artifact_facts(artifact))
    _print_text(artifact)
    print_text_table(residual_rows(artifact, MOST_HEADS))
    for sentence in verdict(artifact):
        print(sentence)


def artifact_facts(artifact: "ProjectionArtifact") -> dict[str, str]:
    """What an artifact is, for which model, and how it was made, in words by name."""

    metadata = artifact.metadata
    algorithm, model, calibration = metadata["algorithm"], metadata["model"], metadata["calibration"]
    extras = [name for name, on in (("query metric", algorithm["metric"]), ("centred", algorithm["centred"])) if on]
    if algorithm["least_squares"]:
        extras.append(f"{algorithm['least_squares']} least-squares rounds")
    steps = f"{algorithm['iterations']} steps per bit"
    return {
        "format": f"version {metadata['format_version']}, written by bpc {metadata['bpc_version']}, checks passed",
        "model": f"{model['id']}{' at ' + model['revision'] if model['revision'] else ''} ({model['model_type']})",
        "layers": f"{len(artifact.layers)} of {model['num_layers']} (full attention)",
        "heads": heads_text(model["kv_heads"], model["query_heads"], model["head_dim"]),
        "RoPE": str(model["rope"] or "none"),
        "method": ", ".join([f"{algorithm['name']}, {steps}", *extras]),
        "codes": f"{algorithm['bits']} bits per key",
        "position shift": "on" if algorithm["position_shift"] else "off",
        "seed": str(algorithm["seed"]),
        "calibration": f"{calibration['samples']} samples of {calibration['sequence_length']:,} tokens, "
        f"{calibration['keys_per_head']:,} keys per KV head, {calibration['dtype']}",
    }


def _print_text(artifact: "ProjectionArtifact") -> None:
    from rich.table import Table

    table = Table("source", "path", "revision", "samples", "tokens")
    for source in artifact.metadata["calibration"]["sources"]:
        revision = source["revision"][:12] if source["revision"] else "local"
        numbers = (str(source["samples"]), f"{source['tokens']:,}")
        table.add_row(*map(printable, (source["name"], source["path"], revision, *numbers)))
    print_table("Text", table)


def residual_rows(artifact: "ProjectionArtifact", most_heads: int | None = None) -> TextTable:
    """The residuals of every layer; those of its heads too, where there are at most `most_heads` (None: always)."""
    algorithm, kv_heads = artifact.metadata["algorithm"], artifact.metadata["model"]["kv_heads"]
    new_text = new_text_residuals(artifact)
    heads = list(range(kv_heads)) if most_heads is None or kv_heads <= most_heads else []
    columns = ("layer", "mean", *([] if new_text is None else ["new text"]), "min", "max")
    rows = []
    for index, layer in artifact.layers.items():
        last = layer.residual[:, -1]
        other = [] if new_text is None else [new_text[index]]
        cells = [last.mean(), *other, last.min(), last.max(), *(last[head] for head in heads)]
        rows.append((str(index), *(f"{value:.3f}" for value in cells)))
    title = f"{residual_title(algorithm)}, after {algorithm['bits']} bits"
    return TextTable(title, (*columns, *(f"head {head}" for head in heads)), rows)
