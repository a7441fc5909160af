"""The parts that all pages have: the document, facts, figures, tables, the text, an evaluation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bpc_calib.evaluation.methods import METHODS
from bpc_cli.console import TextTable, size_text
from bpc_cli.eval_tables import evaluation_tables
from bpc_cli.report.markup import Html, element, join
from bpc_cli.report.style import STEPS, STYLE

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_cli.artifact_tables import Inspected

__all__ = [
    "document",
    "evaluation",
    "facts",
    "figures",
    "file_facts",
    "key",
    "keys",
    "scale_key",
    "scroll",
    "section",
    "table",
    "text_section",
    "verdict_box",
]

GENERATOR = "bpc inspect"
# Nothing is loaded and nothing runs, whatever a file made its way into the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def document(title: str, *body: Html) -> str:
    """The whole page."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(STYLE)),
    )
    page = element("html", head, element("body", element("main", *body)), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def section(title: str, *body: object, lead: str | None = None) -> Html:
    """A part with a title, and a line that says what it shows."""
    return element("section", element("h2", title), *([element("p", lead, class_="lead")] if lead else []), *body)


def scroll(*body: Html) -> Html:
    """What may be wider than the page: it scrolls alone."""
    return element("div", *body, class_="scroll", tabindex="0")


def verdict_box(artifact: "ProjectionArtifact") -> Html:
    """The verdict in words; one that asks for something stands out."""
    from bpc_artifacts.verdict import asks_for_action, verdict

    style = "verdict warn" if asks_for_action(artifact) else "verdict"
    return element("div", *(element("p", text) for text in verdict(artifact)), class_=style)


def figures(values: Mapping[str, str]) -> Html:
    """A few large numbers with their names."""
    tiles = (element("div", element("b", value), element("span", name)) for name, value in values.items())
    return element("div", *tiles, class_="figures")


def facts(rows: Mapping[str, object]) -> Html:
    """Names and values."""
    lines = (element("tr", element("th", name, scope="row"), element("td", value)) for name, value in rows.items())
    return scroll(element("table", element("tbody", *lines), class_="facts"))


def table(found: TextTable, style: str = "numbers", mark: str | None = None) -> Html:
    """A table, without its title; rows that begin with `mark` stand out."""
    head = element("tr", *(element("th", name, scope="col") for name in found.columns))
    lines = (
        element("tr", *(element("td", cell) for cell in row), class_="mark" if row[0] == mark else None)
        for row in found.rows
    )
    return scroll(element("table", element("thead", head), element("tbody", *lines), class_=style))


def key(style: str, name: str) -> Html:
    """A sign of a chart and what it stands for."""
    return element("span", element("i", class_=style), name)


def keys(*signs: Html) -> Html:
    """The signs of a chart."""
    return element("div", *signs, class_="keys")


def scale_key(scale: str, low: str, high: str) -> Html:
    """The colours of a scale, between the names of its ends."""
    steps = (element("i", class_=f"step {scale}{step}") for step in range(STEPS))
    return element("span", low, join(*steps), Html("<b></b>"), high)


def text_section(artifact: "ProjectionArtifact", title: str = "Where the calibration text came from") -> Html:
    """The sources of the calibration text."""
    sources = artifact.metadata["calibration"]["sources"]
    total = max(1, sum(max(0, each["tokens"]) for each in sources))
    optional = [name for name in ("split", "field") if any(each[name] for each in sources)]
    names = ("source", "path", "revision", *optional, "samples", "tokens", "share", "sha256 of the tokens")
    lines = []
    for each in sources:
        share = max(0, each["tokens"]) / total
        bar = element("span", class_="bar", style=f"width: {round(70 * share)}px")
        cells: list[object] = [each["name"], each["path"], (each["revision"] or "local")[:12]]
        cells += [*(each[name] or "" for name in optional), f"{each['samples']:,}", f"{each['tokens']:,}"]
        cells += [join(bar, f"{share:.0%}"), element("code", each["sha256"][:16])]
        lines.append(element("tr", *(element("td", cell) for cell in cells)))
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    held_out = artifact.metadata["metrics"].get("held_out")
    count = 0 if held_out is None else held_out["samples"]
    aside = f"{count or 'no'} {'samples were' if count > 1 else 'sample was'} kept aside"
    return section(
        title,
        scroll(element("table", head, element("tbody", *lines), class_="facts sources")),
        lead=f"Samples are drawn from these texts; {aside} to measure the projections on new text.",
    )


def evaluation(each: "Inspected", title: str = "Quality") -> list[Html]:
    """The result of `bpc eval`, where one was given."""
    if each.evaluation is None:
        return []
    settings = ", ".join(
        f"{name.replace('_', ' ')}: {'none' if value == [] else value}"
        for name, value in each.evaluation["settings"].items()
    )
    parts: list[Html] = []
    for found in evaluation_tables(each.evaluation["rows"], each.evaluation["model"]):
        parts += [element("h3", found.title), table(found, mark=METHODS["bpc"].label)]
    lead = f"What each method keeps of full attention, measured by bpc eval ({settings})."
    return [section(title, *parts, lead=lead)]


def file_facts(each: "Inspected") -> dict[str, str]:
    """The file of an artifact, by name, size and hash."""
    commit = f" at {each.commit}" if each.commit else ""
    return {
        "file": f"{each.path.name}{commit}",
        "size": size_text(each.path.stat().st_size),
        "sha256 of the tensors": each.artifact.metadata["payload_sha256"],
    }
