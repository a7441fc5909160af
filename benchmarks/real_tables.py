"""The tables of docs/real-models.md and of README.md, from the results of real_suite.py."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from markdown_table import Results, filled, link, percent, table

from bpc_calib.evaluation.methods import FIGURES, METHODS
from bpc_calib.evaluation.statistics import mean
from bpc_calib.method.defaults import budget_text

__all__ = ["LENGTH", "TABLES", "label", "longest", "main_budget", "models", "on_text", "spread"]

Row = dict[str, Any]
PARTS = (
    "calibrate", "quality", "budgets", "losses", "others", "methods", "defaults", "tasks", "generate", "decode",
    "engines",
)  # fmt: skip
NOTHING = "Not measured yet: `make real`."
LENGTH = 8192  # tokens per prompt of the first table and the picture
HEADLINE = ("full", "oracle", "bpc", "bpc-product", "bpc-online", "paper", "random")
LABELS = {
    "oracle": "the exact best tokens",
    "paper": "BPC, `--method paper`",
    "bpc-product": "BPC, `--codes product`",
}
ENGINES = {"transformers": "transformers, full attention", "bpc": "BPC in transformers"}


def models(results: Results, part: str) -> dict[str, Row]:
    """What a part measured, by model; empty if it has not run."""
    return results.get(f"real_{part}", {}).get("models", {})


def on_text(results: Results) -> dict[str, Row]:
    """The rows on text of the parts `quality`, `budgets` and `others`, by model."""
    parts = [models(results, part) for part in ("quality", "budgets", "others")]
    return {
        model: {"rows": [row for part in parts for row in part.get(model, {"rows": []})["rows"]]} for model in parts[0]
    }


def label(method: str) -> str:
    """The name of a method in tables and pictures."""
    return LABELS.get(method) or METHODS[method].label


def short(results: Results) -> str:
    """What a user of `bpc generate` pays and gets: loss, bytes and speed with its default settings."""
    lines = []
    for model, found in models(results, "generate").items():
        losses = [row for row in models(results, "defaults").get(model, {"rows": []})["rows"] if _default(row)]
        shortest = min(row["prompt_tokens"] for row in found["rows"])
        for row in found["rows"]:
            prompt, share, calibrated = row["prompt_tokens"], row["kv_bytes_share"], row["projections"] == "calibrated"
            if row["tokens"] < 2 or not (calibrated or prompt == shortest):
                continue
            # The evaluated lengths include the forced tokens; the prompt leaves room for the new ones.
            near = [each for each in losses if each["method"] == "bpc" and 0.85 < prompt / each["tokens"] <= 1]
            speeds = [run["tokens_per_second"] for run in (row["full_attention"], row)]
            loss = spread(near[0]["loss_difference"]) if near and calibrated else ""
            about = [model, f"{prompt:,}", row["projections"], f"{percent(share, 0)} %", loss]
            lines.append([*about, *(f"{speed:.1f}" for speed in speeds), f"{_speedup(row):.2f}"])
            model = ""
    heads = ["model", "prompt, tokens", "projections", "KV bytes read", "loss", "full attention, tokens/s"]
    return table([*heads, "BPC, tokens/s", "speedup"], lines) if lines else NOTHING


def headline(results: Results) -> str:
    """Both models at the main budget, with code and prose together."""
    lines = []
    for model, found in on_text(results).items():
        rows = [row for row in found["rows"] if row["tokens"] == longest(found["rows"], LENGTH)]
        main, least = main_budget(rows), min(row["budget"] for row in rows if row["budget"])
        rows.sort(key=lambda row: row["forced"])  # those with the most forced tokens replace the others
        first = {row["method"]: row for row in rows if row["budget"] in (main, None)}
        for method in (name for name in HEADLINE if name in first):
            lines.append([model, label(method), _read(first[method]), *_figures(first[method])])
            model = ""
        last = next(row for row in rows if row["method"] == "bpc" and row["budget"] == least)
        lines.append(["", f"BPC, {budget_text(least)} attended", _read(last), *_figures(last)])
    return filled(["model", "method", "KV read", *FIGURES.values()], lines) if lines else NOTHING


def text(results: Results) -> str:
    """Every row of the main methods: model, length and budget."""
    lines = []
    for model, found in on_text(results).items():
        for row in _sorted(found["rows"]):
            if row["method"] != "full":
                about = [model, f"{row['tokens']:,}", budget_text(row["budget"]), f"{row['forced']}"]
                lines.append([*about, label(row["method"]), _read(row), *_figures(row)])
    heads = ["model", "tokens", "budget", "forced", "method", "KV read", *FIGURES.values()]
    return filled(heads, lines) if lines else NOTHING


def corpora(results: Results) -> str:
    """Prose and code apart, at the main budget."""
    lines = []
    for model, found in on_text(results).items():
        rows = _sorted(found["rows"])
        main = main_budget(rows)
        for row in rows:
            for corpus, own in row["by_corpus"].items() if row["budget"] == main else ():
                lines.append([model, f"{row['tokens']:,}", corpus, label(row["method"]), *_figures(own)])
    lines.sort(key=lambda line: line[:3])
    return filled(["model", "tokens", "text", "method", *FIGURES.values()], lines) if lines else NOTHING


def layers(results: Results) -> str:
    """The cosine of each layer's output, at the main budget: with BPC and with the exact best tokens."""
    parts = []
    for model, found in on_text(results).items():
        rows = [row for row in found["rows"] if row["tokens"] == longest(found["rows"], LENGTH) and row["budget"]]
        main = main_budget(rows)
        own = {row["method"]: row for row in rows if row["budget"] == main and row["method"] in HEADLINE}
        lines = []
        for place, layer in enumerate(own["bpc"]["layers"]):
            heads = [own[name]["cosine_by_head"][place] for name in ("bpc", "oracle")]
            lines.append([layer, *(f"{sum(values) / len(values):.3f}" for values in heads)])
        parts.append(table([f"{model}, layer", "BPC", label("oracle")], lines))
    return "\n\n".join(parts) or NOTHING


def losses(results: Results) -> str:
    """The loss on more texts, and by how much it is above twice that of the exact best tokens on the same texts."""
    lines = []
    for model, found in models(results, "losses").items():
        likely = {row["method"]: row["log_likelihoods"] for row in found["rows"]}
        for row in _sorted(found["rows"]):
            own, above = row["method"], ""
            if own in ("bpc", "bpc-product"):  # loss - 2 * (loss of the exact best), in log-likelihoods
                texts = zip(likely["full"], likely["oracle"], likely[own], strict=True)
                above = spread(mean([2 * best - full - ours for full, best, ours in texts]))
            if own != "full":
                about = [model, f"{row['tokens']:,}", row["prompts"], label(own)]
                lines.append([*about, spread(row["loss_difference"]), spread(row["kl"]), above])
    heads = ["model", "tokens", "texts", "method", "loss", "KL", "loss above twice the exact best's"]
    return filled(heads, lines) if lines else NOTHING


def methods(results: Results) -> str:
    """All methods of `bpc eval`."""
    lines = []
    for model, found in models(results, "methods").items():
        order = _order()
        for row in sorted(found["rows"], key=lambda row: order.index(row["method"])):
            lines.append([model, label(row["method"]), _read(row), *_figures(row)])
            model = ""
    return filled(["model", "method", "KV read", *FIGURES.values()], lines) if lines else NOTHING


def defaults(results: Results) -> str:
    """BPC without and with the dense layers and the least number of tokens of `bpc generate`."""
    lines = []
    for model, found in models(results, "defaults").items():
        for row in _sorted(found["rows"]):
            if row["method"] in ("oracle", "bpc"):
                setting = "as `bpc generate` decodes" if _default(row) else "every layer chooses"
                about = [model, f"{row['tokens']:,}", label(row["method"]), setting, _read(row)]
                lines.append([*about, spread(row["loss_difference"]), spread(row["kl"]) if "kl" in row else ""])
    lines.sort(key=lambda line: (line[0], int(line[1].replace(",", "")), line[2]))
    return filled(["model", "tokens", "method", "setting", "KV read", "loss", "KL"], lines) if lines else NOTHING


def _default(row: Row) -> bool:
    """Whether a row is of the defaults of `bpc generate`; older results have no others."""
    return bool(row.get("default_rules", True))


def asked(results: Results) -> str:
    """What full attention answers of every task: it decides what is measured."""
    lines = []
    for model, found in models(results, "tasks").items():
        for row in found["asked"]:
            lines.append([model, row["task"], f"{row['tokens']:,}", row["prompts"], percent(row["score"]["value"], 0)])
    return table(["model", "task", "tokens", "prompts", "right, %"], lines) if lines else NOTHING


def tasks(results: Results) -> str:
    """Right answers to the questions that full attention can answer."""
    measured = {row["method"] for found in models(results, "tasks").values() for row in found["rows"]}
    names, lines = [name for name in HEADLINE if name in measured], []
    for model, found in models(results, "tasks").items():
        for task, tokens in dict.fromkeys((row["task"], row["tokens"]) for row in found["rows"]):
            own = {row["method"]: row for row in found["rows"] if (row["task"], row["tokens"]) == (task, tokens)}
            scores = [[percent(own[name]["score"][side], 0) for side in ("value", "low", "high")] for name in names]
            cells = [f"{value} ({low} to {high})" for value, low, high in scores]
            lines.append([model, task, f"{tokens:,}", own["full"]["prompts"], *cells])
    return table(["model", "task", "tokens", "prompts", *map(label, names)], lines) if lines else NOTHING


def generate(results: Results, part: str = "generate") -> str:
    """What `bpc generate --compare` prints."""
    lines = []
    for model, found in models(results, part).items():
        for row in found["rows"]:
            ours, theirs = (run["tokens_per_second"] for run in (row, row["full_attention"]))
            speeds = [f"{speed:.1f}" if speed else "" for speed in (ours, theirs)]
            share = "" if row["kv_bytes_share"] is None else f"{percent(row['kv_bytes_share'])} %"
            times = [f"{row[name]:.2f}" for name in ("prefill_seconds", "prepare_seconds")]
            lines.append(
                [model, f"{row['prompt_tokens']:,}", row["projections"], share, *times, *speeds, f"{_speedup(row):.2f}"]
            )
    heads = ["model", "tokens", "projections", "KV read", "prefill, s", "preparing, s", "BPC, tokens/s"]
    return table([*heads, "full attention, tokens/s", "speedup behind the prefill"], lines) if lines else NOTHING


def decode(results: Results, part: str = "decode") -> str:
    """What a decoding step takes, and the same model without attention."""
    lines = []
    for model, found in models(results, part).items():
        times = {(row["length"], row["form"], row["products"]): row for row in found["rows"]}
        for length, form in dict.fromkeys((row["length"], row["form"]) for row in found["rows"]):
            each = [times[length, form, products]["milliseconds"] for products in ("oneDNN", "torch's own")]
            hashing = times[length, form, "oneDNN"]["hashing_milliseconds"]
            lines.append(
                [model, f"{length:,}", form, *(f"{ms:.1f}" for ms in each), f"{hashing:.0f}" if hashing else ""]
            )
            model = ""
    heads = [
        "model",
        "tokens",
        "form",
        "ms a step, oneDNN",
        "ms a step, torch's own products",
        "hashing the prompt, ms",
    ]
    return table(heads, lines) if lines else NOTHING


def engines(results: Results) -> str:
    """What a user of a CPU would take instead."""
    lines = []
    for model, found in models(results, "engines").items():
        for number, tokens in enumerate(found["settings"]["lengths"]):
            for engine in found["engines"]:
                row, name = engine["rows"][number], ENGINES.get(engine["engine"], engine["engine"])
                speeds = [f"{row['prefill_tokens_per_second']:,.0f}", f"{row['decode_tokens_per_second']:.1f}"]
                whole = row["first_token_seconds"] + (row["new"] - 1) / row["decode_tokens_per_second"]
                about = [model, f"{tokens:,}", f"{name} ({engine['version']})"]
                lines.append([*about, *speeds, f"{whole:.1f}", f"{engine['peak_bytes'] / 1e9:.1f}"])
    heads = ["model", "tokens", "engine", "prefill, tokens/s", "decoding, tokens/s", "seconds in all", "peak GB"]
    return table(heads, lines) if lines else NOTHING


def calibrate(results: Results) -> str:
    """What calibration took, and the residuals on text kept aside."""
    lines = []
    for model, found in models(results, "calibrate").items():
        for row in found["rows"]:
            held_out = f"{row['held_out']['residual']:.3f}" if row.get("held_out") else ""
            about = [model, row["projections"], row["algorithm"]["bits"], f"{row['tokens']:,}", f"{row['seconds']:.0f}"]
            lines.append([*about, f"{row['residual']:.3f}", held_out])
    heads = ["model", "projections", "bits", "tokens", "seconds", "residual", "on new text"]
    return table(heads, lines) if lines else NOTHING


def files(results: Results) -> str:
    """The parts, how long they took, and their files."""
    lines = []
    for part in PARTS:
        if found := models(results, part):
            minutes = sum(each["seconds"] for each in found.values()) / 60
            lines.append([f"`{part}`", f"{minutes:.1f}", link(f"real_{part}")])
    return table(["part", "minutes", "file"], lines) if lines else NOTHING


TABLES: dict[str, Callable[[Results], str]] = {
    "real-short": short, "real-headline": headline, "real-text": text, "real-corpora": corpora, "real-layers": layers,
    "real-losses": losses, "real-methods": methods, "real-defaults": defaults, "real-asked": asked, "real-tasks": tasks,
    "real-generate": generate, "real-decode": decode, "real-engines": engines, "real-calibrate": calibrate,
    "real-generate-epyc": partial(generate, part="generate_epyc"),
    "real-decode-epyc": partial(decode, part="decode_epyc"), "real-files": files,
}  # fmt: skip


def main_budget(rows: Iterable[Row]) -> float:
    """The budget with the most forced tokens."""
    return float(max((row for row in rows if row["budget"]), key=lambda row: row["forced"])["budget"])


def longest(rows: Iterable[Row], most: int) -> int:
    """The greatest length of these rows up to a limit."""
    return max(row["tokens"] for row in rows if row["tokens"] <= most)


def _speedup(row: Row) -> float:
    """Full attention's seconds per token behind the prefill, hashing included, over BPC's."""
    ours, theirs = (
        (run["prepare_seconds"] + run["decode_seconds"]) / max(1, run["tokens"] - 1)
        for run in (row, row["full_attention"])
    )
    return theirs / ours


def _sorted(rows: Iterable[Row]) -> list[Row]:
    """By length, budget and method."""
    order = _order()
    return sorted(rows, key=lambda row: (row["tokens"], -(row["budget"] or 1), order.index(row["method"])))


def _order() -> list[str]:
    """The methods as tables list them."""
    order = list(METHODS)
    place = order.index("bpc-online")
    return [*order[:place], "bpc-product", order[place], "paper", *order[place + 1 :]]


def _read(row: Row) -> str:
    return f"{percent(row['read'])} %"


def _figures(row: Row) -> list[str]:
    return [spread(row[name]) if name in row else "" for name in FIGURES]


def spread(figure: dict[str, float]) -> str:
    """A value and half its 95 % interval."""
    return f"{figure['value']:.3f} ± {(figure['high'] - figure['low']) / 2:.3f}"
