"""The tables of docs/projections.md and the first table of README.md, from the results of projections.py."""

from markdown_table import Results, percent, table

__all__ = ["codes", "hashing_time", "headline", "headline_both", "measured"]

METHODS = {"as in the paper": "as in the paper", "score-aware": "score-aware", "exact": "the exact best tokens"}


def measured(results: Results, name: str, variant: str, budget: float | None, metric: str = "needle") -> float:
    """A figure of the study `projections_{name}.json`.

    Raises:
        KeyError: the study has no such row.
    """
    for row in results[f"projections_{name}"]["rows"]:
        if (row["variant"], row["budget"]) == (variant, budget):
            return row[metric]["value"] if isinstance(row[metric], dict) else row[metric]
    raise KeyError(f"projections_{name}.json has no row {variant!r} at budget {budget}")


def headline(results: Results) -> str:
    """The bundled model at two lengths."""
    columns = [(name, budget) for name in ("demo_2048", "demo_8192") for budget in (0.02, 0.005, 0.0025)]
    reads = [percent(measured(results, "demo_2048", "headline: score-aware", b, "read")) for _, b in columns[:3]]
    labels = {
        "exact": "the exact best tokens",
        "score-aware": f"BPC (reads {reads[0]} %, {reads[1]} % or {reads[2]} % of the KV bytes)",
        "as in the paper": "BPC with the settings of the paper (`--method paper`)",
    }
    full = [f"{percent(measured(results, name, 'full attention', None))} %" for name in ("demo_2048", "demo_8192")]
    lines = [["full attention", full[0], "", "", full[1], "", ""]]
    for variant, label in labels.items():
        cells = [f"{percent(measured(results, name, f'headline: {variant}', budget))} %" for name, budget in columns]
        lines.append([label, *cells])
    heads = ["right answers", "2,048 tokens: 2 %", "0.5 %", "0.25 %", "8,192 tokens: 2 %", "0.5 %", "0.25 %"]
    return table(heads, lines)


def headline_both(results: Results) -> str:
    """Both models at two lengths and all budgets."""
    budgets = (0.0025, 0.005, 0.01, 0.02, 0.05)
    lines = []
    for model, label in (("demo", "bundled"), ("second", "second")):
        for length in (2048, 8192):
            name = f"{model}_{length}"
            prompts = results[f"projections_{name}"]["settings"]["prompts"]
            about = f"{label}, {length:,}" + ("" if prompts == 300 else f" ({prompts} questions)")
            full = percent(measured(results, name, "full attention", None))
            shown = {row["budget"] for row in results[f"projections_{name}"]["rows"]}
            for variant, method in METHODS.items():
                cells = [
                    percent(measured(results, name, f"headline: {variant}", budget)) if budget in shown else ""
                    for budget in budgets
                ]
                if variant == "score-aware":
                    cells = [f"**{cell}**" if cell else "" for cell in cells]
                lines.append([about, full, method, *cells])
                about = full = ""
    return table(["model, tokens", "full attention", "", *(f"{100 * budget:g} %" for budget in budgets)], lines)


def codes(results: Results) -> str:
    """Other codes of as many bytes, on the bundled model and on real text."""
    variants = {
        "random signs (LSH)": ("random signs (LSH)", "8"),
        "PCA + sign": ("PCA + sign", "8"),
        "PCA + sign + gain": ("PCA + sign + gain", "9"),
        "RaBitQ": ("RaBitQ: random rotation, centred, gain", "9"),
        "ITQ": ("ITQ", "8"),
        "ITQ + gain": ("ITQ + gain", "9"),
        "score-aware": ("**score-aware**", "9"),
        "online": ("online", "9"),
        "exact": ("the exact best tokens", ""),
    }
    columns = [("demo_2048_codes", 0.005, "needle"), ("demo_2048_codes", 0.02, "needle")]
    columns += [
        (name, budget, metric)
        for name in ("demo_2048_codes", "realtext_2048")
        for budget, metric in ((0.005, "best_kept"), (0.02, "mass"))
    ]
    lines = []
    for variant, (label, size) in variants.items():
        cells = []
        for name, budget, metric in columns:
            value = measured(results, name, f"others: {variant}", budget, metric)
            cells.append(percent(value, 0) if metric == "needle" else f"{value:.3f}")
        lines.append([label, size, *cells])
    kept = ["best kept at 0.5 %", "mass at 2 %"]
    heads = ["64 bits", "bytes per key", "answers at 0.5 %", "at 2 %", *kept]
    return table([*heads, f"real text: {kept[0]}", kept[1]], lines)


def hashing_time(results: Results) -> str:
    """Ratios of times, from the least to the most over the dtypes."""
    rows = results["hashing_time"]["rows"]
    tokens = rows[0]["what"].split()[1]

    def ratios(what: str, form: str, base: str) -> list[str]:
        cells = []
        for dim in (64, 128):
            times: dict[str, dict[str, float]] = {}
            for row in rows:
                if row["what"] == what and row["head_dim"] == dim:
                    times.setdefault(row["dtype"], {})[row["form"]] = row["milliseconds"]
            found = sorted({f"{each[form] / each[base]:.2f}" for each in times.values()})
            cells.append(" to ".join(found))
        return cells

    step = f"a step after {tokens} tokens"
    lines = [
        [
            f"hashing {tokens} tokens: with metric and mean",
            *ratios(f"hashing {tokens} tokens", "metric, centred", "paper"),
        ],
        ["hashing one token: with metric and mean", *ratios("hashing 1 token", "metric, centred", "paper")],
        [f"{step}: with the gain", *ratios(step, "gain, relative", "no gain, relative")],
        [f"{step}: `relative` instead of `max`", *ratios(step, "gain, relative", "gain, max")],
    ]
    return table(["time with / without", "`head_dim` 64", "`head_dim` 128"], lines)
