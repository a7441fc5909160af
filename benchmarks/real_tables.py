"""The tables and the picture of two trained models, from the results of real_suite.py."""

from collections.abc import Callable, Iterable, Sequence
from math import expm1
from pathlib import Path
from typing import Any

from report import Results, filled, link, percent

from bpc_calib.evaluation.methods import FIGURES, METHODS
from bpc_calib.method.defaults import budget_text

__all__ = ["PARTS", "PICTURE", "TABLES", "draw"]

Row = dict[str, Any]
PARTS = ("calibrate", "quality", "budgets", "losses", "others", "methods", "defaults", "tasks", "generate")
NOTHING = "Not measured yet: `make real`."
LENGTH = 8192  # tokens per prompt of the first table and the picture
HEADLINE = ("full", "oracle", "bpc", "bpc-online", "paper", "random")
SHOWN = {name: FIGURES[name] for name in ("loss_difference", "kl", "mass", "cosine")}
LABELS = {"oracle": "the exact best tokens", "paper": "BPC, `--method paper`"}
ENGINES = {"transformers": "transformers, full attention", "bpc": "BPC in transformers"}
PICTURE = "real-models.png"
INK = "#7d8590"  # readable on white and on black: the picture has no background
STYLES = {  # marker and colour
    "bpc": ("o", "#2f81f7"), "bpc-online": ("s", "#a371f7"), "paper": ("D", "#d29922"), "oracle": ("^", "#2da44e"),
    "random": ("x", "#f85149"),
}  # fmt: skip


def models(results: Results, part: str) -> dict[str, Row]:
    """What a part measured, by model; empty if it has not run. Older results have methods that are no more."""
    found = results.get(f"real_{part}", {}).get("models", {})
    known = {*METHODS, "paper"}
    return {
        model: made | {"rows": [row for row in made.get("rows", []) if row.get("method", "bpc") in known]}
        for model, made in found.items()
    }


def on_text(results: Results) -> dict[str, list[Row]]:
    """The rows on text of the parts `quality`, `budgets` and `others`, by model."""
    parts = [models(results, part) for part in ("quality", "budgets", "others")]
    return {model: [row for part in parts for row in part.get(model, {"rows": []})["rows"]] for model in parts[0]}


def label(method: str) -> str:
    return LABELS.get(method) or METHODS[method].label


def _table(heads: Sequence[str], lines: list[list[Any]]) -> str:
    return filled(heads, lines) if lines else NOTHING


def short(results: Results) -> str:
    """What a user of `bpc generate` pays and gets: loss, bytes and speed with its default settings."""
    lines = []
    for model, found in models(results, "generate").items():
        losses = [row for row in models(results, "defaults").get(model, {"rows": []})["rows"] if row["default_rules"]]
        shortest = min(row["prompt_tokens"] for row in found["rows"])
        for row in found["rows"]:
            prompt, share, calibrated = row["prompt_tokens"], row["kv_bytes_share"], row["projections"] == "calibrated"
            if row["tokens"] < 2 or not (calibrated or prompt == shortest):
                continue
            # The evaluated lengths include the forced tokens; the prompt leaves room for the new ones.
            near = [each for each in losses if each["method"] == "bpc" and 0.85 < prompt / each["tokens"] <= 1]
            loss = spread(near[0]["loss_difference"]) if near and calibrated else ""
            lines.append(
                [model, f"{prompt:,}", row["projections"], f"{percent(share, 0)} %", loss, *_speeds(row)[::-1]]
            )
            lines[-1].append(f"{_speedup(row):.2f}")
            model = ""
    heads = ["model", "prompt, tokens", "projections", "KV bytes read", "loss", "full attention, tokens/s"]
    return _table([*heads, "BPC, tokens/s", "speedup"], lines)


def headline(results: Results) -> str:
    """Both models at the main budget, with code and prose together."""
    lines = []
    for model, found in on_text(results).items():
        rows = [row for row in found if row["tokens"] == longest(found)]
        main = float(max((row for row in rows if row["budget"]), key=lambda row: row["forced"])["budget"])
        least = min(row["budget"] for row in rows if row["budget"])
        rows.sort(key=lambda row: row["forced"])  # those with the most forced tokens replace the others
        first = {row["method"]: row for row in rows if row["budget"] in (main, None)}
        for method in (name for name in HEADLINE if name in first):
            lines.append([model, label(method), _read(first[method]), *_figures(first[method])])
            model = ""
        last = next(row for row in rows if row["method"] == "bpc" and row["budget"] == least)
        lines.append(["", f"BPC, {budget_text(least)} attended", _read(last), *_figures(last)])
    return _table(["model", "method", "KV read", *SHOWN.values()], lines)


def lengths(results: Results) -> str:
    """KL by model, length and budget, of the exact best tokens and of BPC."""
    lines = []
    for model, found in on_text(results).items():
        places = sorted({(row["tokens"], row["budget"]) for row in found if row["budget"]}, key=lambda p: (p[0], -p[1]))
        for tokens, budget in places:
            own = {row["method"]: row for row in found if (row["tokens"], row["budget"]) == (tokens, budget)}
            pair = [own[name] for name in ("oracle", "bpc")]
            cells = [spread(row["kl"]) for row in pair]
            lines.append([model, f"{tokens:,}", budget_text(budget), pair[0]["forced"], *cells])
            model = ""
    heads = ["model", "tokens", "budget", "forced", "KL: exact best", "KL: BPC"]
    return _table(heads, lines)


def methods(results: Results) -> str:
    """All methods of `bpc eval`."""
    lines, order = [], [name for each in METHODS for name in ([each, "paper"] if each == "bpc-online" else [each])]
    for model, found in models(results, "methods").items():
        rows = [row for row in found["rows"] if row["method"] != "full"]
        for row in sorted(rows, key=lambda row: order.index(row["method"])):
            lines.append([model, label(row["method"]), _read(row), *_figures(row)[:3]])
            model = ""
    return _table(["model", "method", "KV read", *list(SHOWN.values())[:3]], lines)


def defaults(results: Results) -> str:
    """BPC and the exact best tokens without and with the dense layers and the least number of `bpc generate`."""
    lines = []
    for model, found in models(results, "defaults").items():
        for tokens, name in dict.fromkeys((row["tokens"], row["method"]) for row in found["rows"]):
            if name not in ("oracle", "bpc"):
                continue
            alike = [row for row in found["rows"] if (row["tokens"], row["method"]) == (tokens, name)]
            pair = [next(row for row in alike if row["default_rules"] is rules) for rules in (True, False)]
            cells = [cell for row in pair for cell in (_read(row), spread(row["loss_difference"]), spread(row["kl"]))]
            lines.append([model, f"{tokens:,}", label(name), *cells])
    heads = ["model", "tokens", "method", "as `bpc generate`: KV read", "loss", "KL", "every layer chooses: KV read"]
    return _table([*heads, "loss", "KL"], lines)


def tasks(results: Results) -> str:
    """Right answers to the questions that full attention can answer."""
    measured = {row["method"] for found in models(results, "tasks").values() for row in found["rows"]}
    names, lines = [name for name in HEADLINE if name in measured], []
    for model, found in models(results, "tasks").items():
        for task, tokens in dict.fromkeys((row["task"], row["tokens"]) for row in found["rows"]):
            own = {row["method"]: row for row in found["rows"] if (row["task"], row["tokens"]) == (task, tokens)}
            scores = [[percent(own[name]["score"][side], 0) for side in ("value", "low", "high")] for name in names]
            cells = [f"{value} ({low} to {high})" for value, low, high in scores]
            lines.append([model, task, own["full"]["prompts"], *cells])
    return _table(["model", "task", "prompts", *map(label, names)], lines)


def generate(results: Results) -> str:
    """What `bpc generate --compare` prints, on two machines."""
    lines = []
    for model, found in models(results, "generate").items():
        others = models(results, "generate_epyc").get(model, {"rows": []})["rows"]
        for row in found["rows"]:
            alike = [each for each in others if all(each[key] == row[key] for key in ("prompt_tokens", "projections"))]
            cells = [cell for run in (row, *alike[:1]) for cell in (*_speeds(run), f"{_speedup(run):.2f}")]
            share = "" if row["kv_bytes_share"] is None else f"{percent(row['kv_bytes_share'])} %"
            lines.append([model, f"{row['prompt_tokens']:,}", row["projections"], share, *cells])
            lines[-1] += [""] * (10 - len(lines[-1]))
            model = ""
    heads = ["model", "tokens", "projections", "KV read", "AMX: BPC, tokens/s", "full attention", "speedup"]
    return _table([*heads, "no AMX: BPC, tokens/s", "full attention", "speedup"], lines)


def decode(results: Results) -> str:
    """What a step takes after 8,000 tokens, and the same model without attention, on two machines."""
    forms: dict[str, list[str]] = {}
    for part in ("decode", "decode_epyc"):
        for found in models(results, part).values():
            for row in (row for row in found["rows"] if row["length"] == 8000):  # both kinds of products in turn
                forms.setdefault(row["form"], []).append(f"{row['milliseconds']:.1f}")
    heads = [f"{machine}, ms: {products}" for machine in ("AMX", "no AMX") for products in ("oneDNN", "torch's own")]
    return _table(["SmolLM2-135M-Instruct", *heads], [[form, *cells] for form, cells in forms.items()])


def engines(results: Results) -> str:
    """What a user of a CPU would take instead."""
    lines = []
    for model, found in models(results, "engines").items():
        for engine in found["engines"]:
            row, name = engine["rows"][-1], ENGINES.get(engine["engine"], engine["engine"])
            speeds = [f"{row['prefill_tokens_per_second']:,.0f}", f"{row['decode_tokens_per_second']:.1f}"]
            lines.append([model, f"{name} ({engine['version']})", *speeds])
            model = ""
    return _table(["model, 8,000 tokens", "engine", "prefill, tokens/s", "decoding, tokens/s"], lines)


def files(results: Results) -> str:
    """The parts, how long they took, and their files."""
    lines = []
    for part in PARTS:
        if found := models(results, part):
            lines.append([f"`{part}`", f"{sum(each['seconds'] for each in found.values()) / 60:.0f}"])
            lines[-1].append(link(f"real_{part}"))
    return _table(["part", "minutes", "file"], lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "real-short": short, "real-headline": headline, "real-lengths": lengths,
    "real-methods": methods, "real-defaults": defaults, "real-tasks": tasks, "real-generate": generate,
    "real-decode": decode, "real-engines": engines,  "real-files": files,
}  # fmt: skip


def draw(results: Results, folder: Path) -> Path | None:
    """Draw what attending to less costs, a panel per model; return the file, or None if nothing has been measured."""
    measured = on_text(results)
    if not measured:
        return None
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("agg")
    with matplotlib.rc_context(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)):
        figure, axes = pyplot.subplots(
            1, len(measured), figsize=(4.6 * len(measured), 3.4), layout="constrained", squeeze=False, sharey=True
        )
        for axis, (model, rows) in zip(axes.flat, measured.items(), strict=True):
            for method in STYLES:
                _curve(axis, method, [r for r in rows if (r["method"], r["tokens"]) == (method, longest(rows))])
            _frame(axis, f"{model}, {longest(rows):,} tokens")
        axes.flat[0].set_ylabel("perplexity above full attention's, %")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        columns = 3 if len(measured) == 1 else len(labels)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
        folder.mkdir(exist_ok=True)
        figure.savefig(folder / PICTURE, dpi=150, transparent=True)
        pyplot.close(figure)
    return folder / PICTURE


def _curve(axis: Any, method: str, rows: list[Row]) -> None:
    """One point per budget, with its interval."""
    rows = sorted(rows, key=lambda row: row["read"])
    sides = ("value", "low", "high")
    middle, low, high = ([100 * expm1(row["loss_difference"][side]) for row in rows] for side in sides)
    below, above = ([abs(a - b) for a, b in zip(middle, ends, strict=True)] for ends in (low, high))
    marker, color = STYLES[method]
    reads, name = [100 * row["read"] for row in rows], label(method).replace("`", "")
    axis.errorbar(reads, middle, [below, above], marker=marker, color=color, capsize=2, label=name)


def _frame(axis: Any, title: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_title(title, fontsize="medium")
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=1)
    axis.set_xlabel("share of the KV bytes read, %")
    axis.set_xlim(0.4, 120)
    axis.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100])
    axis.xaxis.set_minor_formatter(NullFormatter())
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.axhline(0, color=INK, linewidth=0.8, linestyle="--")
    axis.tick_params(labelsize="small")
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(INK)


def longest(rows: Iterable[Row]) -> int:
    """The greatest length of these rows up to that of the first table."""
    return max(row["tokens"] for row in rows if row["tokens"] <= LENGTH)


def spread(figure: dict[str, float]) -> str:
    """A value and half its 95 % interval."""
    return f"{figure['value']:.3f} ± {(figure['high'] - figure['low']) / 2:.3f}"


def _speeds(row: Row) -> list[str]:
    """Tokens per second of BPC and of full attention."""
    return [f"{run['tokens_per_second'] or 0:.1f}" for run in (row, row["full_attention"])]


def _speedup(row: Row) -> float:
    """Full attention's seconds per token behind the prefill, hashing included, over BPC's."""
    ours, theirs = (
        (run["prepare_seconds"] + run["decode_seconds"]) / max(1, run["tokens"] - 1)
        for run in (row, row["full_attention"])
    )
    return theirs / ours


def _read(row: Row) -> str:
    return f"{percent(row['read'])} %"


def _figures(row: Row) -> list[str]:
    return [spread(row[name]) if name in row else "" for name in SHOWN]
