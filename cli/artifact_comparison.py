"""Two artifacts side by side: what differs in how they were made, and their residuals."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bpc_cli.artifact_tables import artifact_facts
from bpc_cli.console import print_text_table, printable
from bpc_cli.inspected import Inspected
from bpc_cli.residual import fitted_residuals, new_text_residuals, residual_title
from bpc_cli.text_table import TextTable

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["Comparison", "compare_artifacts", "difference_table", "print_comparison", "residual_table"]


@dataclass(frozen=True)
class Comparison:
    """What two artifacts A and B have in common, and what not."""

    differences: dict[str, tuple[str, str]]  # what was made differently, in words by name
    same: dict[str, str]
    comparable: bool  # whether their residuals are shares of the same thing
    notes: list[str]  # what to know before the residuals are compared
    fitted: tuple[dict[int, float], dict[int, float]]  # by layer
    new_text: tuple[dict[int, float] | None, dict[int, float] | None]
    change: dict[int, float]  # B minus A: on new text if both have it, else on the fitted keys; empty: not comparable

    def as_json(self) -> dict[str, Any]:
        """The comparison as JSON types; layers are strings, and pairs are lists, A first."""
        return {
            "differences": {name: list(pair) for name, pair in self.differences.items()},
            "comparable": self.comparable,
            "notes": self.notes,
            "residual": [{str(layer): value for layer, value in each.items()} for each in self.fitted],
            "residual_on_new_text": [
                None if each is None else {str(layer): value for layer, value in each.items()} for each in self.new_text
            ],
            "change": {str(layer): value for layer, value in self.change.items()},
        }


def compare_artifacts(one: "ProjectionArtifact", two: "ProjectionArtifact") -> Comparison:
    """Compare two checked artifacts; they may belong to different models."""
    facts = [artifact_facts(each) | _more_facts(each) for each in (one, two)]
    same = {name: text for name, text in facts[0].items() if facts[1][name] == text}
    differences = {name: (text, facts[1][name]) for name, text in facts[0].items() if name not in same}
    titles = [residual_title(each.metadata["algorithm"]) for each in (one, two)]
    comparable = titles[0] == titles[1]
    new_text = (new_text_residuals(one), new_text_residuals(two))
    fitted = (fitted_residuals(one), fitted_residuals(two))
    measured = fitted if new_text[0] is None or new_text[1] is None else (new_text[0], new_text[1])
    shared = [layer for layer in one.layers if layer in two.layers] if comparable else []
    return Comparison(
        differences,
        same,
        comparable,
        list(_notes(one, two, titles, "text" in differences)),
        fitted,
        new_text,
        {layer: measured[1][layer] - measured[0][layer] for layer in shared},
    )


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
    for name, fitted, new_text in zip("AB", found.fitted, found.new_text, strict=True):
        columns[name] = fitted
        if new_text is not None:
            columns[f"{name}, new text"] = new_text
    rows = []
    for layer in sorted({*found.fitted[0], *found.fitted[1]}):
        values = [f"{column[layer]:.3f}" if layer in column else "" for column in columns.values()]
        change = [f"{found.change[layer]:+.3f}" if layer in found.change else ""] if found.change else []
        rows.append((str(layer), *values, *change))
    return TextTable(
        "Residual, mean over KV heads", ("layer", *columns, *(["B minus A"] if found.change else [])), rows
    )


def _more_facts(artifact: "ProjectionArtifact") -> dict[str, str]:
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
