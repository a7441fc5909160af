"""Write the tables of measured numbers in README.md and docs/ from the results in benchmarks/results/.

    python benchmarks/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function. Edit the function, not the
table: a test compares the two.
"""

import json
import re
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import real_tables
from report import ROOT, Lines, Results, Row, by, made_by, percent

from bpc_calib.evaluation.methods import METHODS

__all__ = ["BLOCK", "TABLES", "fill", "load", "pages"]

BLOCK = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
SDPA = "SDPA, group folded"
SPEEDUPS = ("speedup over SDPA", "over the best dense form")
SHAPES = {"llama-3.2-1b": "Llama 3.2 1B", "qwen3-4b": "Qwen3 4B", "llama-3.1-8b": "Llama 3.1 8B"}
BATCHES = (1, 8)


def layer(results: Results) -> Lines:
    """A step of one attention layer on a CPU."""
    yield "tokens", "attended", "BPC, ms", *SPEEDUPS
    rows = [row for row in results["bench_cpu_layer"]["layer"] if row["median"]]
    for row in (row for row in rows if row["method"] == "BPC" and row["stage"] == "step"):
        same = [each for each in rows if each["tokens"] == row["tokens"]]
        dense = {each["form"]: each["median"] for each in same if each["method"] == "dense"}
        ratios = (f"{other / row['median']:.1f}" for other in (dense[SDPA], min(dense.values())))
        yield row["tokens"], row["attended"], f"{row['median'] / 1e3:.2f}", *ratios


def whole_models(results: Results) -> Lines:
    """Tokens per second of whole models on a CPU: all shapes, with one sequence and with eight."""
    yield (
        "model", "sequences", "tokens of each", "transformers, tokens/s", "full attention at its best", "BPC",
        "limit by bytes", "BPC over transformers", "over full at its best", "limit of that",
    )  # fmt: skip
    for shape, row in _whole(results, BATCHES):
        yield shape, row["batch"], row["tokens"], *_speeds(row), *_speedups(row)


def whole_models_short(results: Results) -> Lines:
    """Those with one sequence."""
    yield (
        "model", "tokens", "transformers", "full attention at its best", "BPC", "limit by bytes",
        "BPC over transformers",
    )  # fmt: skip
    for shape, row in _whole(results, (1,)):
        yield shape, row["tokens"], *_speeds(row), _speedups(row)[0]


def _whole(results: Results, batches: tuple[int, ...], suffix: str = "") -> Iterator[tuple[str, Row]]:
    """The rows by shape and number of sequences; 131,072 tokens ran apart, with fewer layers."""
    for shape, batch, run in product(SHAPES, batches, ("", "_128k")):
        for row in results.get(f"bench_cpu_{shape}_{batch}{run}{suffix}", {"decode": {"rows": []}})["decode"]["rows"]:
            yield SHAPES[shape], row


def _speeds(row: Row) -> list[str]:
    sides = [f"{row[name]['tokens_per_second']:.2f}" for name in ("transformers", "full", "bpc")]
    return [*sides, f"{1e3 * row['batch'] / row['bpc']['floor']:.2f}"]


def _speedups(row: Row) -> list[str]:
    over = row["transformers"]["milliseconds"] / row["bpc"]["milliseconds"]
    return [f"{over:.1f}", f"{row['times_full']:.2f}", f"{row['limit_times_full']:.2f}"]


def whole_models_avx512(results: Results) -> Lines:
    """Those that ran on a processor with AVX-512 and without AMX."""
    yield (
        "model", "sequences", "tokens of each", "transformers, tokens/s", "full attention at its best", "BPC",
        "limit by bytes", "BPC over transformers", "over full at its best", "limit of that",
    )  # fmt: skip
    for shape, row in _whole(results, BATCHES, "_avx512"):
        yield shape, row["batch"], row["tokens"], *_speeds(row), *_speedups(row)


def few_tokens(results: Results) -> Lines:
    """How fast weights of one shape are read that are multiplied with a few tokens."""
    one_shape = (row for row in results["few_tokens"]["rows"] if (row["outputs"], row["columns"]) == (8192, 2048))
    found = by(one_shape, "processor", "tokens", "dtype")
    dtypes = ("bfloat16", "float16", "float32")
    yield "processor", "tokens", *(f"{dtype}: {form}" for dtype in dtypes for form in ("torch, GB/s", "BPC"))
    for processor, tokens in dict.fromkeys(case[:2] for case in found):
        rows = [found[processor, tokens, dtype] for dtype in dtypes]
        yield processor, tokens, *(row[form] for row in rows for form in ("torch", "bpc"))


def scaling(results: Results) -> Lines:
    """A step by query heads per KV head and by budget, at 32,768 tokens and batch 1."""
    rows = results["bench_cpu_scaling"]["layer"]
    steps = [row for row in rows if row["method"] == "BPC" and row["stage"] == "step" and row["batch"] == 1]
    found = by(steps, "group", "attended")
    groups, counts = (sorted({row[name] for row in steps}) for name in ("group", "attended"))
    yield "query heads per KV head", *(f"{count:,} attended, ms" for count in counts)
    for group in groups:
        yield group, *(f"{found[group, count]['median'] / 1e3:.2f}" for count in counts)


def kernel_cost(results: Results) -> Lines:
    """A model of a step on an H100."""
    yield "tokens", "launches", "us", "us, free loads", "us, shares by head", "dense by bytes, us"
    own = by(results["kernel_cost"]["steps"], "tokens", "by_head")
    for tokens in dict.fromkeys(tokens for tokens, _ in own):
        step = own[tokens, False]
        times = [step[name] for name in ("microseconds", "least_microseconds", "dense_microseconds_by_bytes")]
        times.insert(2, own[tokens, True]["microseconds"])
        yield tokens, step["launched"], *(f"{time:.1f}" for time in times)


def gpu_layer(results: Results) -> Lines:
    """A step of one attention layer on a GPU, before its kernels were tuned there and since."""
    yield "tokens", "attended", "before, us", "BPC, us", "fastest dense form, us", "speedup"
    before, now = (_layer_steps(results[name]) for name in ("gpu_suite_before", "gpu_suite"))
    for tokens, (bpc, dense) in sorted(now.items()):
        times = (before[tokens][0]["median"], bpc["median"])
        fastest = f"{dense['median']:.1f} ({dense['form']})"
        yield tokens, bpc["attended"], *(f"{time:.1f}" for time in times), fastest, f"{bpc['times_dense']:.2f}"


def _layer_steps(suite: Row) -> dict[int, tuple[Row, Row]]:
    """By tokens, BPC's step and the fastest dense form."""
    found = {}
    for part in suite["parts"]["layer"]["rows"]:
        rows = part["result"]["layer"]
        bpc = next(row for row in rows if row["method"] == "BPC" and row["stage"] == "step")
        found[bpc["tokens"]] = bpc, next(row for row in rows if row.get("best"))
    return found


def gpu_models(results: Results) -> Lines:
    """Steps of a whole model on a GPU, as CUDA graphs."""
    yield "tokens", "attended", "full attention at its best, tokens/s", "BPC", "speedup", "the bytes allow"
    for step in results["gpu_suite_h100"]["parts"]["decode"]["rows"]:
        for row in step.get("result", {}).get("decode", {}).get("rows", []):
            speeds = (f"{row[name]['tokens_per_second']:.1f}" for name in ("full", "bpc"))
            yield row["tokens"], row["attended"], *speeds, f"{row['times_full']:.2f}", f"{row['limit_times_full']:.2f}"


def gpu_serving(results: Results) -> Lines:
    """A server's step of a layer on a GPU, over pages and over rows."""
    yield "requests, tokens of each", "over pages, us", "over rows, us", "FP8 over pages, us"
    rows = results["gpu_suite"]["parts"]["serving"]["rows"]
    times = {row["what"]: f"{row['median']:.1f}" for row in rows if row.get("median")}
    for what in (name.removesuffix(": a step over rows") for name in times if name.endswith("a step over rows")):
        if "FP8" not in what:
            steps = ("a step over pages", "a step over rows")
            yield what, *(times[f"{what}: {each}"] for each in steps), times[f"{what}, FP8 cache: {steps[0]}"]


def offload_plan(results: Results) -> Lines:
    """Keys and values in main memory: what is held and moved, and computed tokens per second."""
    yield (
        "card, model", "tokens", "weights, GB", "codes", "keys and values", "per step: card, GB", "PCIe, MB",
        "main memory, GB", "BPC, all on the card, tokens/s", "BPC, attending in main memory", "the same, eager",
        "at most: BPC, chosen rows over PCIe", "at most: full attention over PCIe",
        "at most: full attention by the CPU",
    )  # fmt: skip
    for row in results["offload_plan"]["rows"]:
        if row["fits"] and row["tokens"] in (1 << 17, 1 << 20):
            held, moved, seconds = row["held"].values(), row["moved"], row["seconds"]
            steps = (moved["card"] / 1e9, moved["pcie"] / 1e6, moved["main"] / 1e9)
            yield (
                f"{row['card']}, {row['model']}, {row['bits']:g} bits", row["tokens"],
                *(f"{each / 1e9:.1f}" for each in held), *(f"{each:.1f}" for each in steps),
                f"{1 / seconds['on_card']:.0f}" if "on_card" in seconds else "",
                *(f"{1 / slow:.1f} to {1 / fast:.1f}" for slow, fast in (seconds["cpu"], seconds["cpu_eager"])),
                *(f"{1 / seconds[f'least_{each}']:.1f}" for each in ("rows_up", "dense_over_pcie", "dense_on_cpu")),
            )  # fmt: skip


def vllm_pages(results: Results) -> Lines:
    """A step over vLLM's pages, by where the keys lie."""
    rows = results["vllm_pages"]["rows"]
    yield "requests", *(f"{kind}, us" for kind in rows[0]["microseconds"])
    for row in rows:
        yield row["requests"], *(f"{each:,.0f}" for each in row["microseconds"].values())


def vllm_attention(results: Results) -> Lines:
    """Attention of a layer of SmolLM2's shape by vLLM's kernel and by BPC, on one thread."""
    processors, usual = {"attention": "AVX2", "attention_avx512": "AVX-512"}, ("SmolLM2 135M", "bfloat16", 1)
    heads = (f"{name}: {what}" for name in processors.values() for what in ("vLLM's kernel, us", "BPC, us", "ratio"))
    yield "requests", "tokens of each", *heads
    found = by(
        [{"processor": each} | row for each in processors for row in results["vllm_pages"][each]["rows"]],
        "processor", "shape", "dtype", "threads", "requests", "tokens",
    )  # fmt: skip
    for case in product((1, 8), (500, 2000, 7500)):
        rows = [found[key] for key in ((processor, *usual, *case) for processor in processors)]
        cells = ((f"{row['stock']:,.0f}", f"{row['bpc']:,.0f}", f"{row['stock'] / row['bpc']:.1f}") for row in rows)
        yield *case, *(cell for each in cells for cell in each)


def serving(results: Results) -> Lines:
    """vLLM's server, stock and with BPC, and the same model in transformers after one prompt."""
    files = {"serving_avx512": "AVX-512", "serving": "AVX2", "serving_float32": "AVX2"}
    found = {
        (processor, results[name]["settings"]["dtype"], *key): row
        for name, processor in files.items()
        for key, row in by(results[name]["rows"], "prompt", "requests", "server").items()
    }
    names = list(dict.fromkeys(server for *_, server in found))
    heads = [f"{name}, tokens/s" for name in names] + [f"{name}: ratio" for name in names[1:]]
    yield "processor", "numbers", "prompt, tokens", "requests", "prompts read by stock, s", *heads
    for case in dict.fromkeys(case[:-1] for case in found):
        same = [found.get((*case, name)) for name in names]
        stock = (*case, names[0])
        read = round(found[stock]["prefill_seconds"])
        speeds = ("" if row is None else f"{row['tokens_per_second']:.1f}" for row in same)
        yield *case, read, *speeds, *("" if row is None else f"{row['ratio']:.2f}" for row in same[1:])


def serving_arrival(results: Results) -> Lines:
    """vLLM from the arrival of prompts that it has not seen, stock and with BPC."""
    yield (
        "model", "prompt, tokens", "requests", "stock, s", "BPC, s", "stock over BPC",
        "decoding alone: stock, tokens/s", "BPC, tokens/s", "BPC over stock",
    )  # fmt: skip
    for model, run in results["serving_arrival"]["models"].items():
        found = by(run["rows"], "prompt", "requests", "server")
        for prompt, requests in dict.fromkeys(case[:2] for case in found):
            stock, own = (found[prompt, requests, server] for server in ("stock", "BPC"))
            whole = (f"{row['whole_seconds']:.1f}" for row in (stock, own))
            speeds = (f"{row['tokens_per_second']:.1f}" for row in (stock, own))
            yield model, prompt, requests, *whole, f"{own['whole_ratio']:.2f}", *speeds, f"{own['ratio']:.2f}"


def headline(results: Results) -> Lines:
    """The bundled model at two lengths."""
    kinds = results["answers_demo"]["rows"]
    found = {kind: by(rows, "method", "tokens", "budget") for kind, rows in kinds.items()}
    lengths, budgets = (2048, 8192), (0.02, 0.005, 0.0025)
    reads = [percent(found["by head"]["bpc", 2048, budget]["read"]) for budget in budgets]
    labels = {
        ("by head", "oracle"): "the exact best tokens",
        ("by head", "bpc"): f"BPC (reads {reads[0]} %, {reads[1]} % or {reads[2]} % of the KV bytes)",
        ("equal", "bpc"): "BPC, `--equal-shares`",
        ("paper", "bpc"): "BPC with the settings of the paper (`--method paper`)",
    }
    yield "right answers", "2,048 tokens: 2 %", "0.5 %", "0.25 %", "8,192 tokens: 2 %", "0.5 %", "0.25 %"
    full = (found["by head"]["full", length, None] for length in lengths)
    yield "full attention", *(cell for row in full for cell in (_right(row), "", ""))
    for (kind, method), label in labels.items():
        rows = (found[kind][method, length, budget] for length in lengths for budget in budgets)
        yield label, *map(_right, rows)


def _right(row: Row) -> str:
    return f"{percent(row['score']['value'])} %"


def adapting(results: Results) -> Lines:
    """KL over that of codes as calibrated, by what the prompt changes of them."""
    found = by(results["adapting_variants"]["rows"], "another_text_follows", "model", "tokens", "codes")
    plain = {place[:3]: row for place, row in found.items() if place[3] == "as calibrated"}
    columns = sorted((place for place in plain if place[2] >= 2048), key=lambda place: place[0])
    yield "codes", *(f"{model}, {tokens:,}{', another text' * other}" for other, model, tokens in columns)
    for codes in dict.fromkeys(place[3] for place in found):
        cells = [_over(found.get((*column, codes)), plain[column]) for column in columns]
        if codes != "as calibrated" and any(cells):
            yield codes, *cells


def _over(row: Row | None, plain: Row) -> str:
    """The mean KL of a row's texts over that of the same texts."""
    return "" if row is None else f"{sum(row['kl']) / sum(plain['kl'][: len(row['kl'])]):.2f}"


def aggregation(results: Results) -> Lines:
    """Right answers about whole lists, by method and budget."""
    found = by(results["aggregation"]["rows"], "method", "budget", "task", "tokens")
    columns = list(dict.fromkeys((task, tokens) for *_, task, tokens in found))
    yield "", "budget", *(f"{task}, {tokens:,} tokens" for task, tokens in columns)
    for method, budget in dict.fromkeys((method, budget) for method, budget, *_ in found):
        scores = [found[method, budget, task, tokens]["score"] for task, tokens in columns]
        cells = (f"{percent(s['value'])} ({percent(s['low'], 0)} to {percent(s['high'], 0)})" for s in scores)
        yield METHODS[method].label, "" if budget is None else f"{percent(budget, 0)} %", *cells


def key_counts(results: Results) -> Lines:
    """Residuals with 64 bits on fitted keys and on others, by keys per head."""
    both = [results["key_counts_demo"], results["key_counts_real_text"]]
    yield "keys", "per bit", *(f"{result['model']}: fitted, others" for result in both)
    found = [by((row for row in result["rows"] if row["bits"] == 64), "keys") for result in both]
    for keys in sorted(found[0].keys() & found[1].keys()):
        rows = [each[keys] for each in found]
        more = [percent(row["others"] / row["own"] - 1, 0) for row in rows]
        cells = (f"{row['own']:.3f}, {row['others']:.3f} (+{m} %)" for row, m in zip(rows, more, strict=True))
        yield keys, keys // 64, *cells


def keys_per_head(results: Results) -> Lines:
    """KL divergence of the next token from full attention's on SmolLM2, by calibration keys and budget."""
    found = by(results["keys_per_head_smollm2"]["rows"], "keys", "budget")
    names, budgets = (list(dict.fromkeys(each)) for each in zip(*found, strict=True))
    yield "keys per head", *(f"KL at {percent(budget)} %" for budget in budgets)
    for name in names:
        rows = (found[name, budget] for budget in budgets)
        yield f"{name} best" if name == "exact" else name, *(f"{row['kl']:.3f} ± {row['kl_error']:.3f}" for row in rows)


def calibration_plan(results: Results) -> Lines:
    """What calibrations took by model; of memory and disk also what was forecast."""
    rows = results["calibration_plan"]["rows"]
    yield "", *(row["model"] for row in rows)
    for name, title, unit, form, sides in (
        ("collect_seconds", "collecting keys", 1, "{:.0f} s", ("real",)),
        ("decompose_seconds", "decomposing", 1, "{:.0f} s", ("real",)),
        ("memory_bytes", "memory: forecast, real", 1e9, "{:.2f} GB", ("plan", "real")),
        ("work_bytes", "disk: forecast, real", 1e6, "{:.0f} MB", ("plan", "real")),
    ):
        yield title, *(", ".join(form.format(row[name][side] / unit) for side in sides) for row in rows)


def fitting_time(results: Results) -> Lines:
    """Seconds to fit a layer, by shape."""
    yield "KV heads, keys per head, head_dim", "torch", "kernels", "ratio"
    for row in results["fitting_time"]["rows"]:
        about = f"{row['kv_heads']}, {row['keys_per_head']:,}, {row['head_dim']}"
        yield about, f"{row['torch_seconds']:.2f} s", f"{row['numba_seconds']:.2f} s", f"{row['speedup']:.1f}"


def generate_without_products(results: Results) -> Lines:
    """A small model there, before its dense steps ran BPC's kernel, and since."""
    yield "prompt", "BPC attends to", "full attention, tokens/s", "BPC", "ratio"
    for row in results["without_products"]["generate"]["rows"]:
        before = row["commit"] == "8f95ff2"
        way = (
            "chosen tokens"
            if row["kv_bytes_share"] < 1
            else "all tokens, by torch"
            if before
            else "all tokens, by its kernel"
        )
        speeds = (f"{row[name]:.1f}" for name in ("full_tokens_per_second", "tokens_per_second"))
        yield row["prompt_tokens"], way, *speeds, f"{row['ratio']:.2f}"


def exact_layers(results: Results) -> Lines:
    """What exact decoding gives a large model on a CPU, from the times of its steps."""
    heads = "full attention, tokens/s", "BPC, tokens/s", "a pass over 5 tokens / a step of one", "exact, tokens/s"
    yield "tokens", *heads
    for row in results["bench_cpu_exact_1"]["decode"]["rows"]:
        full, ours, exact = (row[side]["tokens_per_second"] for side in ("full", "bpc", "exact"))
        slower = row["verify"]["milliseconds"] / row["full"]["milliseconds"]
        yield row["tokens"], f"{full:.2f}", f"{ours:.2f}", f"{slower:.2f}", f"{exact:.2f}"


def exact_texts(results: Results) -> Lines:
    """Texts with drafts beside full attention's."""
    yield "model", "drafted at once", "tokens", "not the most likely ones", "drafted tokens that were right"
    for model, name in (("SmolLM2-135M-Instruct", "smollm2"), ("the bundled model", "demo")):
        groups: dict[Any, list[Row]] = {}
        for row in results[f"exact_texts_{name}"]["rows"]:
            groups.setdefault(row["draft"], []).append(row)
        for draft, rows in groups.items():
            tokens, right, checked = (sum(row[name] for row in rows) for name in ("new", "right", "checked"))
            others = sum(row.get("not_best", 0) for row in rows)
            yield model, draft or "adaptive", tokens, others, f"{percent(right / checked)} % of {checked:,}"
            model = ""


def additive_codes(results: Results) -> Lines:
    """Nibbles beside FAISS's quantizers of the same size."""
    yield "codes", "squared error", "to that of nibbles, by head", "to fit a head, s", "to encode a key, us"
    rows = results["additive_codes"]["rows"]
    nibbles = by((row for row in rows if row["codes"] == "nibbles"), "layer", "head")
    for name in dict.fromkeys(row["codes"] for row in rows):
        own = [row for row in rows if row["codes"] == name]
        ratios = [row["error"] / nibbles[row["layer"], row["head"]]["error"] for row in own]
        error, fit = (statistics.mean(row[figure] for row in own) for figure in ("error", "fit"))
        encode = statistics.mean(1e6 * row["encode"] / row["encoded"] for row in own)
        spread = "" if name == "nibbles" else f"{min(ratios):.2f} to {max(ratios):.2f}"
        yield name, f"{error:.3f}", spread, f"{fit:.1f}", f"{encode:.1f}"


def nibbles_time(results: Results) -> Lines:
    """How many times as long as with signs a step, its scores and hashing take with nibbles."""
    whats = "step", "score", "hash a token", "hash a prompt"
    yield "", "shape", "tokens", "a step", "its scores", "to hash a token", "to hash a prompt of 8,192 tokens"
    for name, where in (("nibbles_time", "without AVX-512"), ("nibbles_time_avx512", "with AVX-512")):
        found, shown = by(results.get(name, {"rows": []})["rows"], "model", "tokens", "what"), None
        for model, tokens in dict.fromkeys((model, tokens) for model, tokens, _ in found):
            rows = [found[model, tokens, what] for what in whats]
            yield where, "" if model == shown else model, tokens, *(f"{row['ratio']:.2f}" for row in rows)
            where, shown = "", model


def larger_than_memory(results: Results) -> Lines:
    """Steps with keys and values in memory, and in a file with and without room for them."""
    yield "keys and values", "limit of memory", "method", "chosen in the step before, too", "tokens/s", "read per step"
    for run in results["larger_than_memory"]["runs"]:
        where = ["on disk" if run["kv_device"] else "in memory", run["limit"] or "none"]
        for row in run["rows"]:
            same = "" if row["again"] is None else f"{percent(row['again'], 0)} %"
            read = f"{row['read_bytes'] / 1e6:,.0f} MB"
            yield *where, row["method"], same, f"{1 / row['seconds']:.2f}", read
            where = ["", ""]


TABLES = real_tables.TABLES | made_by(
    layer, whole_models, whole_models_short, whole_models_avx512, few_tokens, scaling, generate_without_products,
    kernel_cost, gpu_layer, gpu_models, gpu_serving, offload_plan, serving, serving_arrival, vllm_pages, vllm_attention,
    headline, adapting, aggregation, key_counts, keys_per_head, calibration_plan, fitting_time, exact_layers,
    exact_texts, larger_than_memory, additive_codes, nibbles_time,
)  # fmt: skip


def main() -> None:
    results = load()
    for page in pages():
        text = page.read_text()
        filled = fill(text, results)
        if filled != text:
            page.write_text(filled)
            print(f"Wrote {page.relative_to(ROOT)}")


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
