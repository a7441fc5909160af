"""The page of `bpc inspect --html` and its pictures, of which `--plot` is one."""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bpc_calib.evaluation.methods import METHODS
from bpc_calib.method.defaults import budget_text
from bpc_cli import artifact_tables
from bpc_cli.artifact_tables import Inspected, new_text_residuals, residual_rows
from bpc_cli.console import TextTable, printable, size_text
from bpc_cli.eval_tables import evaluation_tables
from bpc_cli.share_tables import SharedOut, loss_table, losses_note, share_table

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_artifacts.replacing import Kind

INK = "#6b6b6c"  # of lines and letters; a page shows them in the colour of its text
COLOURS, WARNING = ("#3b82d6", "#e07a1f"), "#d64541"  # to be seen on white and on black
MOST_NAMES = 16  # of layers or heads, along an axis
# Nothing is loaded and nothing runs, whatever text made its way from a file into the page.
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="bpc inspect">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ground: #fcfcfb; --ink: #1b1b19; --quiet: #63615b; --line: #dddbd5; }
@media (prefers-color-scheme: dark) { :root { --ground: #161615; --ink: #f0efea; --quiet: #a3a19a; --line: #3a3936; } }
body { max-width: 1080px; margin: 0 auto; padding: 16px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 4px; } h3 { font-size: 14px; margin: 14px 0 4px; } p { margin: 4px 0; }
body > p { margin-top: 24px; }
.quiet, summary, th { color: var(--quiet); font-weight: 500; }
.warn { border-left: 4px solid #d64541; padding-left: 12px; }
.scroll { overflow-x: auto; } svg { color: var(--quiet); width: 100%; min-width: 640px; height: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 16px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { white-space: nowrap; } .wide td { overflow-wrap: normal; } tr.mark * { font-weight: 700; color: var(--ink); }
</style></head>
<body><h1>{{ title }}</h1>
{% for part in parts %}
<section><h2>{{ part.title }}</h2>
{% if part.lead %}<p class="quiet">{{ part.lead }}</p>{% endif %}
<div{% if part.warn %} class="warn"{% endif %}>{% for text in part.verdict %}<p>{{ text }}</p>{% endfor %}</div>
{% if part.picture %}<div class="scroll" tabindex="0" role="img" aria-label="{{ part.title }}">
{{- part.picture|safe }}</div><details><summary>The numbers</summary>{% endif %}
{% for table in part.tables %}
{% if table.title %}<h3>{{ table.title }}</h3>{% endif %}
<div class="scroll" tabindex="0" role="group" aria-label="{{ table.title or part.title }}">
<table{% if table.columns %} class="wide"{% endif %}>
{% if table.columns %}<tr>{% for name in table.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr>{% endif %}
{% for row in table.rows %}
<tr{% if row[0] == mark %} class="mark"{% endif %}><th scope="row">{{ row[0] }}</th>
{%- for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
{% if part.picture %}</details>{% endif %}</section>
{% endfor %}
<p class="quiet">A residual of 0 means that codes describe keys completely, one of 1 that they say nothing.</p>
</body></html>
"""


class _Part(NamedTuple):
    """A section of the page; where it has a picture, its tables have the numbers of the picture."""

    title: str
    tables: list[TextTable]
    lead: str = ""
    picture: str = ""
    verdict: Sequence[str] = ()
    warn: bool = False


def check_page(path: Path, force: bool) -> None:
    """Raise a `BPCError` if the page of `--html` could not be written."""
    from bpc_artifacts.replacing import try_replacing

    try_replacing(path, 4 << 20, force, _kind())


def write_page(found: Sequence[Inspected], path: Path, force: bool) -> None:
    """Write the page of one artifact, or the one that compares two; the same artifacts give the same bytes."""
    from jinja2 import Environment

    from bpc_artifacts.replacing import replacing

    ids = dict.fromkeys(each.artifact.metadata["model"]["id"] for each in found)
    title = f"{' and '.join(ids)}: {'BPC artifact' if len(found) == 1 else 'two BPC artifacts'}"
    made = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    page = made.render(title=title, parts=_parts(found), mark=METHODS["bpc"].label)
    with replacing(path, force, _kind()) as temporary:
        temporary.write_text(printable(page, keep="\n"), encoding="utf-8")


def draw_residuals(artifact: "ProjectionArtifact", path: Path, force: bool, shares: SharedOut | None = None) -> None:
    """Draw the picture of `--plot`: residuals by bits, and by layer and head; below them the shares by head."""
    from matplotlib.figure import Figure

    from bpc_artifacts.replacing import PICTURE, replacing

    figure = Figure(figsize=(12, 4.5 if shares is None else 9), layout="constrained")
    if shares is None:
        _by_bits(figure, artifact)
    else:
        halves: Any = figure.subfigures(2, 1)
        _by_bits(halves[0], artifact)
        _by_need(halves[1], shares)
    figure.suptitle(printable(artifact.metadata["model"]["id"]), parse_math=False)
    with replacing(path, force, PICTURE) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the font may lack letters of a name
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)


def _kind() -> "Kind":
    from bpc_artifacts.replacing import Kind

    def is_page(path: Path) -> bool:
        with open(path, "rb") as file:
            return b'<meta name="generator" content="bpc inspect">' in file.read(1024)

    return Kind("a page of bpc inspect", is_page)


def _parts(found: Sequence[Inspected]) -> Iterator[_Part]:
    """The sections about one artifact, or about two, which are called A and B."""
    named = dict(zip(("A", "B") if len(found) == 2 else ("",), found, strict=True))
    artifacts = {name: each.artifact for name, each in named.items()}
    yield from (_verdict(each, f"{name}: {each.path.name}".removeprefix(": ")) for name, each in named.items())
    layers, notes, compared = [residual_rows(each) for each in artifacts.values()], "", None
    if len(found) == 2:
        compared = artifact_tables.compare_artifacts(*artifacts.values())
        layers, notes = [artifact_tables.residual_table(compared), *layers], " ".join(compared.notes)
        differs = artifact_tables.difference_table(compared)._replace(title="")
        yield _Part("What differs", [differs] if differs.rows else [], "" if differs.rows else "Nothing.")
    picture = _svg(_by_layer, artifacts, 3.5) if compared is None or compared.comparable else ""
    yield _Part("Residual by layer", layers, notes, picture)
    for name, each in named.items():
        of = f" of {name}" if name else ""
        yield _Part(f"By bits and by head{of}", [*_numbers(each.artifact)], "", _svg(_by_bits, each.artifact, 4.5))
        if each.shares is not None:
            shown = [share_table(each.shares), loss_table(each.shares)]
            yield _Part(f"Shares by head{of}", shown, losses_note(each.shares), _svg(_by_need, each.shares, 4.5))
        if each.evaluation is not None:
            settings = ", ".join(f"{key}: {value}" for key, value in each.evaluation["settings"].items())
            shown = evaluation_tables(each.evaluation["rows"], each.evaluation["model"])
            yield _Part(f"Quality{of}", shown, f"What each method keeps of full attention, by bpc eval ({settings}).")
        yield _texts(each.artifact, f"Calibration text{of}")
    made = artifact_tables.artifact_facts(found[0].artifact) if compared is None else compared.same
    yield _Part("How it was made" if compared is None else "The same in both", [TextTable("", (), list(made.items()))])


def _verdict(each: Inspected, title: str) -> _Part:
    from bpc_artifacts.verdict import asks_for_action, verdict

    size, sha256 = size_text(each.path.stat().st_size), each.artifact.metadata["payload_sha256"]
    file = [("size", size), ("commit", each.commit or "a local file"), ("sha256 of the tensors", sha256)]
    return _Part(title, [TextTable("", (), file)], "", "", verdict(each.artifact), asks_for_action(each.artifact))


def _numbers(artifact: "ProjectionArtifact") -> Iterator[TextTable]:
    """The residuals after every 8 bits, and those on new text by head; `residual_rows` has them on the fitted keys."""
    means = {layer: each.residual.mean(axis=0) for layer, each in artifact.layers.items()}
    bits = artifact.metadata["algorithm"]["bits"] // (len(next(iter(means.values()))) - 1)  # of a step
    after = {layer: values[:: max(1, 8 // bits)] for layer, values in means.items()}
    yield _table("After the first bits", after, [8 * step for step in range(len(next(iter(after.values()))))])
    if (held_out := artifact.metadata["metrics"].get("held_out")) is not None:
        heads = [f"head {head}" for head in range(artifact.metadata["model"]["kv_heads"])]
        yield _table("On new text", {i: held_out["residual_by_head"][str(i)] for i in artifact.layers}, heads)


def _table(title: str, values: Mapping[int, Sequence[float]], names: Sequence[object]) -> TextTable:
    rows = [(str(layer), *(f"{value:.3f}" for value in row)) for layer, row in values.items()]
    return TextTable(title, ("layer", *map(str, names)), rows)


def _texts(artifact: "ProjectionArtifact", title: str) -> _Part:
    names = ("name", "path", "split", "field", "revision", "samples", "tokens", "sha256")
    rows = [tuple(str(each[name] or "") for name in names) for each in artifact.metadata["calibration"]["sources"]]
    aside = (artifact.metadata["metrics"].get("held_out") or {}).get("samples", 0)
    return _Part(title, [TextTable("", names, rows)], f"Samples kept aside as new text: {aside}.")


def _svg(draw: Callable[[Any, Any], None], subject: Any, height: float) -> str:
    """A picture as a part of a page: letters stay text, and the same numbers give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context({"svg.hashsalt": "bpc", "svg.fonttype": "none", **dict.fromkeys(inked, INK)}):
        out = io.StringIO()
        figure = Figure(figsize=(12, height), layout="constrained")
        draw(figure, subject)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    return text.replace(INK, "currentColor")


def _by_bits(figure: Any, artifact: "ProjectionArtifact") -> None:
    """Residuals after each bit, a line per layer, and after all bits by layer and head."""
    import numpy as np
    from matplotlib import colormaps

    layers = list(artifact.layers)
    residual = np.stack([layer.residual for layer in artifact.layers.values()])  # [layers, heads, steps + 1]
    steps, bits = residual.shape[2] - 1, artifact.metadata["algorithm"]["bits"]
    curves, heads = figure.subplots(1, 2)
    colours = colormaps["plasma"](np.linspace(0.35, 0.7, len(layers)))
    named = dict(_ticks(layers))
    for place, values in enumerate(residual.mean(axis=1)):
        name = f"layer {named[place]}" if place in named else None
        curves.plot(np.arange(steps + 1) * (bits // steps), values, color=colours[place], label=name)
    if (new_text := new_text_residuals(artifact)) is not None:
        curves.scatter([bits] * len(layers), list(new_text.values()), c=colours, marker="x", label="new text")
    limits = (0, max(1, residual.max()))
    curves.set(xlabel="bits", ylabel="residual, mean over KV heads", ylim=limits, title="Residual by bits")
    curves.legend(fontsize="small", ncols=1 + len(named) // 12, frameon=False)
    _map(figure, heads, layers, residual[:, :, -1], vmin=0, vmax=1)
    heads.set(title="Residual after all bits")


def _by_need(figure: Any, found: SharedOut) -> None:
    """The share of the tokens by layer and head, and the sum of the heads' losses by budget."""
    import numpy as np
    from matplotlib.colors import LogNorm

    heads, curves = figure.subplots(1, 2)
    shares = 100 * np.array(list(found.by_head.values()))  # [layers, heads]
    _map(figure, heads, list(found.by_head), shares, norm=LogNorm(0.05, 100))
    heads.set(title=f"Attended tokens at a budget of {budget_text(found.budget)}, in %")
    budgets, *losses = zip(*found.losses, strict=True)
    for colour, name, values in zip(COLOURS, ("shares by head", "equal shares"), losses, strict=True):
        curves.plot([100 * budget for budget in budgets], values, color=colour, marker="o", label=name)
    curves.set(xlabel="budget, in % of the tokens", xscale="log", ylabel="sum of the heads' losses, KL")
    curves.set(ylim=(0, None), title="Loss by budget")
    curves.set_xticks([100 * budget for budget in budgets], [f"{100 * budget:.3g}" for budget in budgets], minor=False)
    curves.set_xticks([], minor=True)
    curves.legend(fontsize="small", frameon=False)


def _map(figure: Any, axis: Any, layers: Sequence[int], values: Any, **scale: Any) -> None:
    """Draw values `[layers, heads]` in colours, and their scale."""
    from matplotlib import colormaps

    # Few colours: matplotlib would turn a scale of many into an image, which a page does not load.
    cells = axis.pcolormesh(values, cmap=colormaps["viridis"].resampled(20), **scale)
    axis.set(xlabel="KV head", ylabel="layer")
    for set_ticks, names in ((axis.set_yticks, layers), (axis.set_xticks, range(values.shape[1]))):
        set_ticks([place + 0.5 for place, _ in _ticks(names)], [str(name) for _, name in _ticks(names)])
    axis.invert_yaxis()
    figure.colorbar(cells, ax=axis, format="%g")


def _by_layer(figure: Any, artifacts: "Mapping[str, ProjectionArtifact]") -> None:
    """The mean residual of each layer of one or two artifacts, the range of its heads, and that on new text."""
    import numpy as np

    from bpc_artifacts.verdict import HIGH

    layers, top = sorted({layer for each in artifacts.values() for layer in each.layers}), 1.0
    axis = figure.subplots()
    for number, (name, artifact) in enumerate(artifacts.items()):
        colour, shown = COLOURS[number], f"{name}, " if name else ""
        places = [layers.index(layer) + 0.3 * (number - (len(artifacts) - 1) / 2) for layer in artifact.layers]
        last = np.stack([layer.residual[:, -1] for layer in artifact.layers.values()])  # [layers, heads]
        new_text = new_text_residuals(artifact) or {}
        axis.vlines(places, last.min(axis=1), last.max(axis=1), colour, linewidth=4, alpha=0.4, label=f"{shown}heads")
        axis.scatter(places, last.mean(axis=1), color=colour, label=f"{shown}fitted keys")
        if new_text:
            hollow: dict[str, Any] = {"facecolors": "none", "edgecolors": colour, "label": f"{shown}new text"}
            axis.scatter(places, list(new_text.values()), 70, **hollow)
        top = max(top, 1.05 * float(last.max()), *(1.05 * value for value in new_text.values()))
    axis.axhline(HIGH, color=WARNING, linestyle="--", label=f"from {HIGH} on, codes say little")
    axis.set(xlabel="layer", ylabel="residual", ylim=(0, top))
    axis.set_xticks([place for place, _ in _ticks(layers)], [str(layer) for _, layer in _ticks(layers)])
    figure.legend(loc="outside lower center", ncols=7, fontsize="small", frameon=False)


def _ticks(names: Sequence[int]) -> list[tuple[int, int]]:
    """The places and the names of layers or heads that have room along an axis."""
    return list(enumerate(names))[:: math.ceil(len(names) / MOST_NAMES)]
