"""Write the tables and the picture of measured numbers in README.md and docs/ from the results in benchmarks/results/.

    python benchmarks/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function below. Edit the function, not the
table: a test compares the two. The picture needs the extra `plots`; `--pictures FOLDER` draws it elsewhere.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import real_tables
from report import ROOT, Results, percent, table

from bpc_calib.evaluation.methods import METHODS

__all__ = ["BLOCK", "TABLES", "fill", "load", "pages"]

Row = dict[str, Any]
BLOCK = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
SDPA = "SDPA, group folded"
SPEEDUPS = ("speedup over SDPA", "over the best dense form", "over the paper's pipeline")
LENGTHS = (8_192, 32_768, 131_072, 524_288)
STUDY = {"as in the paper": "as in the paper", "score-aware": "BPC", "exact": "the exact best tokens"}

# Llama 3.1 8B in bf16: bytes per token and layer of keys and values, and of codes and gains; bytes of the weights that
# a step reads (one row of the embedding is nothing beside them).
KEYS_AND_VALUES, CODES = 8 * 128 * 2 * 2, 8 * (8 + 1)
LAYERS, DENSE_LAYERS = 32, 2
LAYER_WEIGHTS = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 + 3 * 4096 * 14336
WEIGHTS = 2 * (LAYERS * LAYER_WEIGHTS + 128_256 * 4096)


def layer(results: Results) -> str:
    """A step of one attention layer on a CPU."""
    lines = []
    rows = [row for row in results["bench_cpu_layer"]["layer"] if row["median"]]
    for row in (row for row in rows if row["method"] == "BPC" and row["stage"] == "step"):
        same = [each for each in rows if each["tokens"] == row["tokens"]]
        dense = {each["form"]: each["median"] for each in same if each["method"] == "dense"}
        paper = [each["median"] for each in same if each["method"] == "paper"]
        others = [dense[SDPA], min(dense.values()), min(paper)]
        cells = [f"{row['tokens']:,}", f"{row['attended']:,}", f"{row['median'] / 1e3:.2f}"]
        lines.append([*cells, *(f"{other / row['median']:.1f}" for other in others)])
    return table(["tokens", "attended", "BPC, ms", *SPEEDUPS], lines)


def decode(results: Results) -> str:
    """Tokens per second of a whole model on a CPU."""
    lines = []
    for name in ("bench_cpu_decode_small_mlp", "bench_cpu_decode"):
        found = results[name]["decode"]
        for row in found["rows"]:
            speeds = [row["bpc"], row["dense_forms"][SDPA], row["full"], row["free"]]
            cells = [
                f"{found['mlp']:,}",
                f"{row['tokens']:,}",
                *(f"{side['tokens_per_second']:.1f}" for side in speeds),
            ]
            lines.append([*cells, f"{100 * row['free']['milliseconds'] / row['bpc']['milliseconds']:.0f} %"])
    heads = ["MLP", "tokens", "BPC, tokens/s", SDPA, "best dense form", "limit", "BPC's share of the limit"]
    return table(heads, lines)


def scaling(results: Results) -> str:
    """A step by query heads per KV head and by budget, at 32,768 tokens and batch 1."""
    rows = results["bench_cpu_scaling"]["layer"]
    steps = [row for row in rows if row["method"] == "BPC" and row["stage"] == "step" and row["batch"] == 1]
    found = {(row["group"], row["attended"]): row for row in steps}
    groups, counts = (sorted({row[name] for row in steps}) for name in ("group", "attended"))
    lines = [[group, *(f"{found[group, count]['median'] / 1e3:.2f}" for count in counts)] for group in groups]
    return table(["query heads per KV head", *(f"{count:,} attended, ms" for count in counts)], lines)


def kernel_cost(results: Results) -> str:
    """A model of a step on an H100."""
    lines = [
        [
            f"{step['tokens']:,}", step["launched"], f"{step['microseconds']:.0f}", f"{step['least_microseconds']:.0f}",
            f"{step['dense_microseconds_by_bytes']:.0f}",
        ]
        for step in results["kernel_cost"]["steps"]
    ]  # fmt: skip
    return table(["tokens", "launches", "us", "us, free loads", "dense by bytes, us"], lines)


def model_bytes(results: Results) -> str:
    """What a step of the whole model reads, counted."""
    lines = []
    for tokens in LENGTHS:
        attended = max(128, tokens * 2 // 100)
        full = WEIGHTS + LAYERS * KEYS_AND_VALUES * tokens
        free = WEIGHTS + DENSE_LAYERS * KEYS_AND_VALUES * tokens
        bpc = free + (LAYERS - DENSE_LAYERS) * (CODES * tokens + KEYS_AND_VALUES * attended)
        cells = [f"{each / 1e9:.2f}" for each in (full, free, bpc)] + [f"{full / each:.2f}" for each in (free, bpc)]
        lines.append([f"{tokens:,}", *cells])
    heads = ["tokens", "full, GB", "free, GB", "BPC, GB", "largest speedup of any sparse attention"]
    return table([*heads, "largest speedup of BPC"], lines)


def serving(results: Results) -> str:
    """vLLM's server, stock and with BPC."""
    rows = results["serving"]["rows"]
    names = list(dict.fromkeys(row["server"] for row in rows))
    lines = []
    for row in (row for row in rows if row["server"] == names[0]):
        same = [each for each in rows if all(each[key] == row[key] for key in ("prompt", "requests"))]
        speeds = [f"{each['tokens_per_second']:.1f}" for each in same]
        lines.append([f"{row['prompt']:,}", row["requests"], *speeds, *(f"{each['ratio']:.2f}" for each in same[1:])])
    heads = [f"{name}, tokens/s" for name in names] + [f"{name}: ratio" for name in names[1:]]
    return table(["prompt, tokens", "requests", *heads], lines)


def headline(results: Results) -> str:
    """The bundled model at two lengths."""
    columns = [(name, budget) for name in ("demo_2048", "demo_8192") for budget in (0.02, 0.005, 0.0025)]
    reads = [percent(_measured(results, "demo_2048", "headline: score-aware", b)["read"]) for _, b in columns[:3]]
    labels = {
        "exact": "the exact best tokens",
        "score-aware": f"BPC (reads {reads[0]} %, {reads[1]} % or {reads[2]} % of the KV bytes)",
        "as in the paper": "BPC with the settings of the paper (`--method paper`)",
    }
    full = [f"{_answers(results, name, 'full attention', None)} %" for name in ("demo_2048", "demo_8192")]
    lines = [["full attention", full[0], "", "", full[1], "", ""]]
    for variant, label in labels.items():
        cells = [f"{_answers(results, name, f'headline: {variant}', budget)} %" for name, budget in columns]
        lines.append([label, *cells])
    heads = ["right answers", "2,048 tokens: 2 %", "0.5 %", "0.25 %", "8,192 tokens: 2 %", "0.5 %", "0.25 %"]
    return table(heads, lines)


def headline_both(results: Results) -> str:
    """Both small models at two lengths."""
    budgets, lines = (0.0025, 0.005, 0.02), []
    for model, name in (("bundled", "demo"), ("second", "second")):
        for length in (2048, 8192):
            study = f"{name}_{length}"
            about, full = f"{model}, {length:,}", _answers(results, study, "full attention", None)
            for variant, label in STUDY.items():
                cells = [_answers(results, study, f"headline: {variant}", budget) for budget in budgets]
                lines.append([about, full, label, *cells])
                about = full = ""
    return table(["model, tokens", "full attention", "", *(f"{100 * budget:g} %" for budget in budgets)], lines)


def _answers(results: Results, study: str, variant: str, budget: float | None) -> str:
    return percent(_measured(results, study, variant, budget)["needle"]["value"])


def _measured(results: Results, study: str, variant: str, budget: float | None) -> Row:
    """A row of the study `projections_{study}.json`."""
    for row in results[f"projections_{study}"]["rows"]:
        if (row["variant"], row["budget"]) == (variant, budget):
            return row
    raise KeyError(f"projections_{study}.json has no row {variant!r} at budget {budget}")


def aggregation(results: Results) -> str:
    """Right answers about whole lists, by method and budget."""
    rows = results["aggregation"]["rows"]
    columns = list(dict.fromkeys((row["task"], row["tokens"]) for row in rows))
    found = {(row["method"], row["budget"], row["task"], row["tokens"]): row["score"] for row in rows}
    lines = []
    for method, budget in dict.fromkeys((row["method"], row["budget"]) for row in rows):
        scores = [found[method, budget, task, tokens] for task, tokens in columns]
        cells = [f"{percent(s['value'])} ({percent(s['low'], 0)} to {percent(s['high'], 0)})" for s in scores]
        lines.append([METHODS[method].label, "" if budget is None else f"{percent(budget, 0)} %", *cells])
    return table(["", "budget", *(f"{task}, {tokens:,} tokens" for task, tokens in columns)], lines)


def key_counts(results: Results) -> str:
    """Residuals with 64 bits on fitted keys and on others, by keys per head."""
    both = [results["key_counts_demo"], results["key_counts_real_text"]]
    found = [{row["keys"]: row for row in result["rows"] if row["bits"] == 64} for result in both]
    lines = []
    for keys in sorted(found[0].keys() & found[1].keys()):
        rows = [each[keys] for each in found]
        more = [percent(row["others"] / row["own"] - 1, 0) for row in rows]
        cells = [f"{row['own']:.3f}, {row['others']:.3f} (+{m} %)" for row, m in zip(rows, more, strict=True)]
        lines.append([f"{keys:,}", keys // 64, *cells])
    return table(["keys", "per bit", *(f"{result['model']}: fitted, others" for result in both)], lines)


def keys_per_head(results: Results) -> str:
    """KL divergence of the next token from full attention's on SmolLM2, by calibration keys and budget."""
    rows = results["keys_per_head_smollm2"]["rows"]
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    found = {(row["keys"], row["budget"]): f"{row['kl']:.3f} \u00b1 {row['kl_error']:.3f}" for row in rows}
    names = list(dict.fromkeys(row["keys"] for row in rows))
    lines = [[f"{name} best" if name == "exact" else name, *(found[name, each] for each in budgets)] for name in names]
    return table(["keys per head", *(f"KL at {percent(each, 1)} %" for each in budgets)], lines)


def calibration_plan(results: Results) -> str:
    """Forecast and real figures by model."""
    rows = results["calibration_plan"]["rows"]
    shown = {
        "collect_seconds": ("collecting keys", 1, "{:.0f} s"), "decompose_seconds": ("decomposing", 1, "{:.0f} s"),
        "memory_bytes": ("memory", 1e9, "{:.2f} GB"), "work_bytes": ("disk", 1e6, "{:.0f} MB"),
    }  # fmt: skip
    lines = []
    for name, (title, unit, form) in shown.items():
        pairs = [[form.format(row[name][side] / unit) for side in ("plan", "real")] for row in rows]
        lines.append([title, *(", ".join(pair) for pair in pairs)])
    return table(["", *(f"{row['model']}: forecast, real" for row in rows)], lines)


def fitting_time(results: Results) -> str:
    """Seconds to fit a layer, by shape."""
    lines = []
    for row in results["fitting_time"]["rows"]:
        about = f"{row['kv_heads']}, {row['keys_per_head']:,}, {row['head_dim']}"
        seconds = [f"{row[f'{backend}_seconds']:.2f} s" for backend in ("torch", "numba")]
        lines.append([about, *seconds, f"{row['speedup']:.1f}"])
    return table(["KV heads, keys per head, head_dim", "torch", "kernels", "ratio"], lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "layer": layer, "decode": decode, "scaling": scaling, "kernel-cost": kernel_cost,
    "model-bytes": model_bytes, "serving": serving, "headline": headline, "headline-both": headline_both,
    "aggregation": aggregation, "key-counts": key_counts, "keys-per-head": keys_per_head,
    "calibration-plan": calibration_plan, "fitting-time": fitting_time, **real_tables.TABLES,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="draw the picture in this folder, and write no page")
    pictures, results = parser.parse_args().pictures, load()
    for page in () if pictures else pages():
        text = page.read_text()
        filled = fill(text, results)
        if filled != text:
            page.write_text(filled)
            print(f"Wrote {page.relative_to(ROOT)}")
    if drawn := real_tables.draw(results, pictures or ROOT / "docs" / "pictures"):
        print(f"Wrote {drawn}")


def load() -> Results:
    """The committed results by file name, without its suffix."""
    return {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}


def pages() -> list[Path]:
    """Every page that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill(text: str, results: Results) -> str:
    """The page with every marked table made again."""
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}\n{TABLES[found[1]](results)}\n\n", text)


if __name__ == "__main__":
    main()
