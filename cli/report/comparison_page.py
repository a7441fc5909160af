"""The page that compares two artifacts."""

from typing import TYPE_CHECKING

from bpc_cli.artifact_tables import Comparison, compare_artifacts, difference_table, residual_table
from bpc_cli.report.artifact_page import by_head, curves_of, ranges_of
from bpc_cli.report.charts import Dots, change_map, curve_chart, heat_map, layer_chart
from bpc_cli.report.markup import Html, element, join
from bpc_cli.report.parts import (
    document,
    evaluation,
    facts,
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
    from bpc_cli.artifact_tables import Inspected

__all__ = ["comparison_page"]

NAMES, STYLES = ("A", "B"), ("one", "two")
LEAST_CHANGE = 0.05  # the scale of differences ends here or above: smaller ones look small


def comparison_page(one: "Inspected", two: "Inspected") -> str:
    """One page about two artifacts: what differs in how they were made, and their residuals side by side."""
    from bpc_artifacts.verdict import HIGH

    pair = (one, two)
    found = compare_artifacts(one.artifact, two.artifact)
    ids = list(dict.fromkeys(each.artifact.metadata["model"]["id"] for each in pair))
    rows = [
        section("What differs", table(difference_table(found), "facts differs"))
        if found.differences
        else section("What differs", element("p", "Nothing: the two were made in the same way."))
    ]
    evaluations = [
        part for name, each in zip(NAMES, pair, strict=True) for part in evaluation(each, f"Quality with {name}")
    ]
    return document(
        f"{' and '.join(ids)}: two BPC artifacts",
        element("p", "Two BPC artifacts", class_="above"),
        element("h1", " and ".join(ids)),
        element("div", *(_head(number, each) for number, each in enumerate(pair)), class_="pair"),
        *rows,
        _layers(found, pair, HIGH),
        _heads(found, pair, HIGH),
        _bits(found, pair, HIGH),
        *evaluations,
        *_texts(pair),
        section("The same in both", facts(found.same)),
        element("footer", "A residual of 0 means that codes describe keys completely, one of 1 that they say nothing."),
    )


def _head(number: int, each: "Inspected") -> Html:
    title = element("h2", element("span", NAMES[number], class_=f"tag {STYLES[number]}"), each.path.name)
    return element("section", title, facts(file_facts(each)), verdict_box(each.artifact))


def _layers(found: Comparison, pair: "tuple[Inspected, Inspected]", limit: float) -> Html:
    details = element("details", element("summary", "The numbers"), table(residual_table(found)))
    notes = [element("p", note, class_="lead") for note in found.notes]
    if not found.change or set(found.fitted[0]) != set(found.fitted[1]):
        return section("Residual by layer", *notes, details)
    series, signs = [], []
    for number, each in enumerate(pair):
        name, style, new_text = NAMES[number], STYLES[number], found.new_text[number]
        series.append(Dots(f"{name}, fitted keys", style, found.fitted[number], ranges_of(by_head(each.artifact))))
        signs.append(key(style, f"{name}, fitted keys"))
        if new_text is not None:
            series.append(Dots(f"{name}, new text", f"{style} hollow", new_text))
            signs.append(key(f"{style} hollow", f"{name}, new text"))
    signs += [key("one bar", "heads"), key("dashed", f"from {limit} on, codes say little")]
    return section("Residual by layer", *notes, scroll(layer_chart(series, limit)), keys(*signs), details)


def _heads(found: Comparison, pair: "tuple[Inspected, Inspected]", limit: float) -> Html:
    new_text = all(each is not None for each in found.new_text)
    one, two = (by_head(each.artifact, new_text) for each in pair)
    maps = [_map(name, heat_map(heads, limit)) for name, heads in zip(NAMES, (one, two), strict=True)]
    signs = [scale_key("s", "0", "1"), key("edge", f"{limit} or more: codes say little")]
    if found.change and {layer: len(heads) for layer, heads in one.items()} == {i: len(h) for i, h in two.items()}:
        change = {layer: [b - a for a, b in zip(one[layer], two[layer], strict=True)] for layer in one}
        widest = max(LEAST_CHANGE, max(abs(value) for heads in change.values() for value in heads))
        maps.append(_map("B minus A", change_map(change, widest)))
        signs.append(scale_key("d", f"B lower by {widest:.2f}", f"higher by {widest:.2f}"))
    lead = "Both on new text." if new_text else "Both on the fitted keys."
    return section("Residual by layer and head", element("div", *maps, class_="maps"), keys(*signs), lead=lead)


def _texts(pair: "tuple[Inspected, Inspected]") -> list[Html]:
    metadata = [each.artifact.metadata for each in pair]
    sources = [each["calibration"]["sources"] for each in metadata]
    aside = [(each["metrics"].get("held_out") or {}).get("samples") for each in metadata]
    if sources[0] == sources[1] and aside[0] == aside[1]:
        return [text_section(pair[0].artifact, "Calibration text of both")]
    return [text_section(each.artifact, f"Calibration text of {n}") for n, each in zip(NAMES, pair, strict=True)]


def _map(name: str, drawn: Html) -> Html:
    return element("figure", element("figcaption", name), scroll(drawn))


def _bits(found: Comparison, pair: "tuple[Inspected, Inspected]", limit: float) -> Html:
    curves = [curves_of(each.artifact, name, style) for name, style, each in zip(NAMES, STYLES, pair, strict=True)]
    signs = [key(f"{style} rule", f"{name}, mean of all layers") for name, style in zip(NAMES, STYLES, strict=True)]
    chart = join(scroll(curve_chart(curves, limit)), keys(*signs, key("one thin", "one layer")))
    return section("Residual by bits", chart, lead="On the fitted keys of each.")
