"""The page of one artifact."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bpc_cli.artifact_tables import artifact_facts, fitted_residuals, new_text_residuals, residual_rows, residual_title
from bpc_cli.report.charts import Curves, Dots, curve_chart, heat_map, layer_chart
from bpc_cli.report.markup import Html, element
from bpc_cli.report.parts import (
    document,
    evaluation,
    facts,
    figures,
    file_facts,
    key,
    keys,
    scale_key,
    scroll,
    section,
    table,
    text_section,
    verdict_box,
)

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_cli.artifact_tables import Inspected

__all__ = ["artifact_page", "by_head", "curves_of", "ranges_of"]


def artifact_page(each: "Inspected") -> str:
    """One page about an artifact: verdict, residuals, text, how it was made, and its evaluation if there is one."""
    from bpc_artifacts.verdict import HIGH

    artifact, metadata = each.artifact, each.artifact.metadata
    algorithm, model = metadata["algorithm"], metadata["model"]
    return document(
        f"{model['id']}: BPC artifact",
        element("p", "BPC artifact, made by bpc ", metadata["bpc_version"], class_="above"),
        element("h1", model["id"]),
        element("p", f"{each.path.name}: codes of {algorithm['bits']} bits per key", class_="below"),
        verdict_box(artifact),
        figures(_figures(artifact)),
        _layers(artifact, HIGH),
        _heads(artifact, HIGH),
        _bits(artifact, HIGH),
        *evaluation(each),
        text_section(artifact),
        section("How it was made", facts(artifact_facts(artifact) | file_facts(each))),
        element("footer", "A residual of 0 means that codes describe keys completely, one of 1 that they say nothing."),
    )


def by_head(artifact: "ProjectionArtifact", new_text: bool = False) -> dict[int, list[float]]:
    """The residual of every head, by layer: on the fitted keys, or on new text, where that was measured."""
    if not new_text:
        return {index: layer.residual[:, -1].tolist() for index, layer in artifact.layers.items()}
    measured = artifact.metadata["metrics"]["held_out"]["residual_by_head"]
    return {index: list(measured[str(index)]) for index in artifact.layers}


def ranges_of(heads: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, float]]:
    """The least and the greatest residual of the heads of each layer."""
    return {layer: (min(values), max(values)) for layer, values in heads.items()}


def curves_of(artifact: "ProjectionArtifact", name: str, style: str) -> Curves:
    """The residuals after each bit, or after each part of 8 bits."""
    layers = {index: layer.residual.mean(axis=0).tolist() for index, layer in artifact.layers.items()}
    mean = [sum(values) / len(layers) for values in zip(*layers.values(), strict=True)]
    return Curves(name, style, artifact.metadata["algorithm"]["bits"] // (len(mean) - 1), mean, layers)


def _figures(artifact: "ProjectionArtifact") -> dict[str, str]:
    calibration, algorithm = artifact.metadata["calibration"], artifact.metadata["algorithm"]
    held_out, fitted = artifact.metadata["metrics"].get("held_out"), fitted_residuals(artifact).values()
    new_text = {} if held_out is None else {"residual, new text": f"{held_out['residual']:.3f}"}
    return {
        **new_text,
        "residual, fitted keys": f"{sum(fitted) / len(fitted):.3f}",
        "bits per key": str(algorithm["bits"]),
        "keys per KV head": f"{calibration['keys_per_head']:,}",
        "samples": f"{calibration['samples']:,}",
        "tokens": f"{calibration['tokens']:,}",
    }


def _layers(artifact: "ProjectionArtifact", limit: float) -> Html:
    series = [Dots("fitted keys", "one", fitted_residuals(artifact), ranges_of(by_head(artifact)))]
    signs = [key("one", "fitted keys, mean over KV heads"), key("one bar", "from the lowest to the highest head")]
    if (new_text := new_text_residuals(artifact)) is not None:
        series.append(Dots("new text", "two hollow", new_text))
        signs.insert(1, key("two hollow", "new text"))
    signs.append(key("dashed", f"from {limit} on, codes say little"))
    return section(
        "Residual by layer",
        scroll(layer_chart(series, limit)),
        keys(*signs),
        element("details", element("summary", "The numbers"), table(residual_rows(artifact))),
        lead=f"{residual_title(artifact.metadata['algorithm'])}: the share of a key that its code does not explain. "
        "Lower is better; new text close to the fitted keys means that the projections hold.",
    )


def _heads(artifact: "ProjectionArtifact", limit: float) -> Html:
    known = {"fitted keys": by_head(artifact)}
    if new_text_residuals(artifact) is not None:
        known["new text"] = by_head(artifact, new_text=True)
    maps = [
        element("figure", element("figcaption", name), scroll(heat_map(values, limit)))
        for name, values in known.items()
    ]
    return section(
        "Residual by layer and head",
        element("div", *maps, class_="maps"),
        keys(scale_key("s", "0", "1"), key("edge", f"{limit} or more: codes say little")),
    )


def _bits(artifact: "ProjectionArtifact", limit: float) -> Html:
    return section(
        "Residual by bits",
        scroll(curve_chart([curves_of(artifact, "", "one")], limit)),
        keys(key("one rule", "mean of all layers"), key("one thin", "one layer")),
        lead="What is left after the first bits of a code, on the fitted keys. Where a curve is flat, more bits add "
        "little.",
    )
