"""An artifact as tables: its facts, its text, its residuals; and two artifacts side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpc_cli.console import TextTable, heads_text, print_rows, print_text_table, printable

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_cli.share_tables import SharedOut


@dataclass(frozen=True)
class Inspected:
    """A checked artifact, the words that named it, its file, its Hub commit, and what else is shown with it."""

    name: str
    path: Path
    commit: str | None  # None: a local file
    artifact: "ProjectionArtifact"
    shares: "SharedOut | None" = None  # None: it does not know what each KV head needs
    evaluation: dict[str, Any] | None = None  # a result of `bpc eval` with it


MOST_HEADS = 8  # columns of the table; the picture and the page show every head


def print_artifact(artifact: "ProjectionArtifact", file: str, commit: str | None) -> None:
    """Print all tables of an artifact that `file` names, and that is at `commit` on the Hub, and the verdict."""
    from bpc_artifacts import verdict

    print_rows("Artifact", {"file": f"{file}{f' at {commit}' if commit else ''}"} | artifact_facts(artifact))
    print_text_table(_text_table(artifact))
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
    steps = f"{algorithm['iterations']} steps per {'nibble' if artifact.nibbles else 'bit'}"
    return {
        "format": f"version {metadata['format_version']}, written by bpc {metadata['bpc_version']}, checks passed",
        "model": f"{model['id']}{' at ' + model['revision'] if model['revision'] else ''} ({model['model_type']})",
        "layers": f"{len(artifact.layers)} of {model['num_layers']} (full attention)",
        "heads": heads_text(model["kv_heads"], model["query_heads"], model["head_dim"]),
        "RoPE": str(model["rope"] or "none"),
        "method": ", ".join([f"{algorithm['name']}, {steps}", *extras]),
        "codes": f"{algorithm['bits']} bits per key{', nibbles' * artifact.nibbles}",
        "position shift": "on" if algorithm["position_shift"] else "off",
        "seed": str(algorithm["seed"]),
        "calibration": f"{calibration['samples']} samples of {calibration['sequence_length']:,} tokens, "
        f"{calibration['keys_per_head']:,} keys per KV head, {calibration['dtype']}",
    }


def _text_table(artifact: "ProjectionArtifact") -> TextTable:
    rows = []
    for source in artifact.metadata["calibration"]["sources"]:
        revision = source["revision"][:12] if source["revision"] else "local"
        rows.append((source["name"], source["path"], revision, str(source["samples"]), f"{source['tokens']:,}"))
    return TextTable("Text", ("source", "path", "revision", "samples", "tokens"), rows)


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
        cells = [layer.mean_residual, *other, last.min(), last.max(), *(last[head] for head in heads)]
        rows.append((str(index), *(f"{value:.3f}" for value in cells)))
    title = f"{residual_title(algorithm)}, after {algorithm['bits']} bits"
    return TextTable(title, (*columns, *(f"head {head}" for head in heads)), rows)


def residual_title(algorithm: dict[str, Any]) -> str:
    """What residuals are shares of; residuals with different titles cannot be compared."""
    keys = "K - mean" if algorithm["centred"] else "K"
    metric = " in the query metric" if algorithm["metric"] else ""
    return f"Residual |{keys} - UP| / |{keys}|{metric}"


def fitted_residuals(artifact: "ProjectionArtifact") -> dict[int, float]:
    """The residual after all bits on the fitted keys: for each layer the mean over KV heads."""
    return {index: layer.mean_residual for index, layer in artifact.layers.items()}


def new_text_residuals(artifact: "ProjectionArtifact") -> dict[int, float] | None:
    """The same on the held-out samples; None if there was none."""
    held_out = artifact.metadata["metrics"].get("held_out")
    if held_out is None:
        return None
    return {index: float(held_out["residual_by_layer"][str(index)]) for index in artifact.layers}


@dataclass(frozen=True)
class Comparison:
    """What two artifacts A and B have in common, and what not; pairs have A first, and residuals are by layer."""

    same: dict[str, str]
    differences: dict[str, tuple[str, str]]  # what was made differently, in words by name
    comparable: bool  # whether their residuals are shares of the same thing
    notes: list[str]  # what to know before the residuals are compared
    residual: tuple[dict[int, float], dict[int, float]]  # on the fitted keys
    residual_on_new_text: tuple[dict[int, float] | None, dict[int, float] | None]
    change: dict[int, float]  # B minus A: on new text if both have it, else on the fitted keys; empty: not comparable


def compare_artifacts(one: "ProjectionArtifact", two: "ProjectionArtifact") -> Comparison:
    """Compare two checked artifacts; they may belong to different models."""
    facts = [artifact_facts(each) | _sources(each) for each in (one, two)]
    same = {name: text for name, text in facts[0].items() if facts[1][name] == text}
    differences = {name: (text, facts[1][name]) for name, text in facts[0].items() if name not in same}
    titles = [residual_title(each.metadata["algorithm"]) for each in (one, two)]
    comparable = titles[0] == titles[1]
    notes = _notes(one, two, titles, "text" in differences)
    fitted = (fitted_residuals(one), fitted_residuals(two))
    new_text = (new_text_residuals(one), new_text_residuals(two))
    before, after = fitted if new_text[0] is None or new_text[1] is None else (new_text[0], new_text[1])
    shared = [layer for layer in one.layers if layer in two.layers] if comparable else []
    change = {layer: after[layer] - before[layer] for layer in shared}
    return Comparison(same, differences, comparable, notes, fitted, new_text, change)


def print_comparison(one: Inspected, two: Inspected) -> None:
    """Print what differs, the residuals side by side, and both verdicts."""
    from bpc_artifacts import verdict

    found = compare_artifacts(one.artifact, two.artifact)
    for name, each in (("A", one), ("B", two)):
        print(printable(f"{name}: {each.name}{f' at {each.commit}' if each.commit else ''}"))
    if found.differences:
        print_text_table(difference_table(found))
    else:
        print("The two were made in the same way.")
    print_text_table(residual_table(found))
    for note in found.notes:
        print(printable(note))
    for name, each in (("A", one), ("B", two)):
        print(printable(f"{name}: {' '.join(verdict(each.artifact))}"))


def difference_table(found: Comparison) -> TextTable:
    """What differs in how the two were made."""
    rows = [(name, *pair) for name, pair in found.differences.items()]
    return TextTable("What differs", ("", "A", "B"), rows)


def residual_table(found: Comparison) -> TextTable:
    """The residuals of every layer of either."""
    columns: dict[str, dict[int, float]] = {}
    for name, fitted, new_text in zip("AB", found.residual, found.residual_on_new_text, strict=True):
        columns[name] = fitted
        if new_text is not None:
            columns[f"{name}, new text"] = new_text
    rows = []
    for layer in sorted({*found.residual[0], *found.residual[1]}):
        values = [f"{column[layer]:.3f}" if layer in column else "" for column in columns.values()]
        change = [f"{found.change[layer]:+.3f}" if layer in found.change else ""] if found.change else []
        rows.append((str(layer), *values, *change))
    return TextTable(
        "Residual, mean over KV heads", ("layer", *columns, *(["B minus A"] if found.change else [])), rows
    )


def _sources(artifact: "ProjectionArtifact") -> dict[str, str]:
    sources = artifact.metadata["calibration"]["sources"]
    texts = [f"{each['name']}: {each['samples']} samples, sha256 {each['sha256'][:8]}" for each in sources]
    return {"text": "; ".join(texts), "config": f"sha256 {artifact.metadata['model']['config_sha256'][:16]}"}


def _notes(one: "ProjectionArtifact", two: "ProjectionArtifact", titles: list[str], other_text: bool) -> list[str]:
    ids = [each.metadata["model"]["id"] for each in (one, two)]
    notes = [] if ids[0] == ids[1] else [f"They belong to different models: {ids[0]} and {ids[1]}."]
    if titles[0] != titles[1]:
        return [*notes, f"Their residuals cannot be compared: A has {titles[0]}, B has {titles[1]}."]
    if other_text:
        notes.append("Each was measured on keys of its own text.")
    if one.metadata["algorithm"]["metric"]:
        notes.append(
            "Each residual is in the query metric that was found with it; bpc eval compares what the two keep of full "
            "attention."
        )
    return notes
