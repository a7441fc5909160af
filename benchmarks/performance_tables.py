"""The tables of measured times and counted bytes, from the results of `bpc bench`."""

from typing import Any

from markdown_table import Results, link, table

__all__ = [
    "bench", "decode", "kernel_cost", "kernel_cost_launches", "layer", "layer_short", "model_bytes", "step_bytes",
]  # fmt: skip

Row = dict[str, Any]

SDPA = "SDPA, group folded"
SPEEDUPS = ("speedup over SDPA", "over the best dense form", "over the paper's pipeline")
STAGES = ("encode", "project", "score", "select", "attend", "step")
LENGTHS = (8_192, 32_768, 131_072, 524_288)

# Llama 3.1 8B in bf16: bytes per token and layer of keys and values, and of codes and gains; bytes of the weights that
# a step reads (one row of the embedding is nothing beside them).
KEYS_AND_VALUES, CODES = 8 * 128 * 2 * 2, 8 * (8 + 1)
LAYERS, DENSE_LAYERS = 32, 2
LAYER_WEIGHTS = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 + 3 * 4096 * 14336
WEIGHTS = 2 * (LAYERS * LAYER_WEIGHTS + 128_256 * 4096)
BANDWIDTH = 4e12  # a round number, not that of a GPU


def layer(results: Results) -> str:
    """A step of one attention layer on a CPU."""
    rows = _steps(results["bench_cpu_layer"]["layer"])
    lines = [[f"{row['tokens']:,}", f"{row['attended']:,}", *_step_cells(row)] for row in rows]
    return table(["tokens", "attended", "BPC, ms", *SPEEDUPS], lines)


def layer_short(results: Results) -> str:
    """The same without the shortest context."""
    rows = _steps(results["bench_cpu_layer"]["layer"])
    lines = [[f"{row['tokens']:,}", *_step_cells(row)] for row in rows if row["tokens"] in LENGTHS]
    return table(["tokens", "BPC, ms", *SPEEDUPS], lines)


def decode(results: Results) -> str:
    """Tokens per second of a whole model on a CPU."""
    lines = []
    for name in ("bench_cpu_decode_small_mlp", "bench_cpu_decode"):
        found = results[name]["decode"]
        label = f"{found['layers']} layers, MLP of {found['mlp']:,}"
        for row in found["rows"]:
            speeds = [row["bpc"], row["dense_forms"][SDPA], row["full"], row["free"]]
            cells = [f"{side['tokens_per_second']:.1f}" for side in speeds]
            share = row["free"]["milliseconds"] / row["bpc"]["milliseconds"]
            lines.append([label, f"{row['tokens']:,}", *cells, f"{100 * share:.0f} %"])
    heads = ["model", "tokens", "BPC, tokens/s", SDPA, "best dense form", "limit", "BPC's share of the limit"]
    return table(heads, lines)


def step_bytes(results: Results) -> str:
    """What a step of one layer moves, counted."""
    lines = []
    for tokens in LENGTHS:
        k = _attended(tokens)
        parts = [KEYS_AND_VALUES * tokens, CODES * tokens, KEYS_AND_VALUES * k, CODES * tokens + KEYS_AND_VALUES * k]
        dense, codes, kept, step = parts
        cells = [f"{dense / 1e6:,.1f}", *(f"{each / 1e6:.2f}" for each in (codes, kept, step)), f"{dense / step:.1f}"]
        lines.append([f"{tokens:,}", f"{k:,}", *cells])
    heads = ["tokens", "attended", "dense, MB", "codes and gains, MB", "keys and values attended, MB"]
    return table([*heads, "a step of BPC, MB", "dense / BPC"], lines)


def kernel_cost(results: Results) -> str:
    """A model of a step on an H100, before and now."""
    lines = []
    for before, now in zip(results["kernel_cost_before"]["steps"], results["kernel_cost"]["steps"], strict=True):
        times = [f"{each['microseconds']:.0f} ({each['least_microseconds']:.0f})" for each in (before, now)]
        launches = [str(each["launched"]) for each in (before, now)]
        dense = f"{now['dense_microseconds_by_bytes']:.0f}"
        lines.append([f"{now['tokens']:,}", *launches, *times, dense])
    heads = ["tokens", "launches before", "now", "us before (free loads)", "us now (free loads)", "dense by bytes, us"]
    return table(heads, lines)


def kernel_cost_launches(results: Results) -> str:
    """The launches of one step in that model."""
    lines = []
    for when, name in (("before", "kernel_cost_before"), ("now", "kernel_cost")):
        step = next(each for each in results[name]["steps"] if each["tokens"] == 131_072)
        for row in step["launches"]:
            numbers = [f"{row['per_key']:.0f}", str(row["registers"]), f"{row['shared']:,}"]
            numbers += [f"{row['barriers']:.0f}", f"{row['shuffles']:.0f}", f"{row['microseconds']:.1f}"]
            lines.append([when, f"`{row['kernel'].removesuffix('_kernel')}`", *numbers])
        operations = sum(step["torch_operations"].values())
        if operations:
            lines.append(
                [when, f"{operations} operations of torch", "", "", "", "", "", f"{step['torch_microseconds']:.1f}"]
            )
    heads = ["", "launch", "instructions per key", "registers", "shared memory, bytes", "barriers", "shuffles", "us"]
    return table(heads, lines)


def model_bytes(results: Results) -> str:
    """What a step of the whole model reads, counted."""
    lines = []
    for tokens in LENGTHS:
        full = WEIGHTS + LAYERS * KEYS_AND_VALUES * tokens
        free = WEIGHTS + DENSE_LAYERS * KEYS_AND_VALUES * tokens
        bpc = free + (LAYERS - DENSE_LAYERS) * (CODES * tokens + KEYS_AND_VALUES * _attended(tokens))
        cells = [f"{each / 1e9:.2f}" for each in (full, free, bpc)] + [f"{full / each:.2f}" for each in (free, bpc)]
        times = " and ".join(f"{1e3 * each / BANDWIDTH:.1f}" for each in (full, bpc))
        lines.append([f"{tokens:,}", *cells, times])
    heads = ["tokens", "full, GB", "free, GB", "BPC, GB", "largest speedup of any sparse attention"]
    return table([*heads, "largest speedup of BPC", "full and BPC at `W` = 4 TB/s, ms"], lines)


def bench(results: Results) -> str:
    """A section for each file, with all of its tables."""
    return "\n\n".join(_section(name, results[name]) for name in sorted(results) if name.startswith("bench_"))


def _attended(tokens: int) -> int:
    return max(128, tokens * 2 // 100)


def _steps(rows: list[Row]) -> list[Row]:
    """The steps of BPC, each with the medians of its stages and the speedups over the other methods."""
    steps = []
    for row in rows:
        if row["method"] != "BPC" or row["stage"] != "step" or not row["median"]:
            continue
        same = [each for each in rows if all(each[key] == row[key] for key in ("batch", "group", "tokens"))]
        alike = [each for each in same if each.get("budget") == row["budget"] and each["median"] is not None]
        dense = {each["form"]: each["median"] for each in same if each["method"] == "dense" and each["median"]}
        paper = [each["median"] for each in alike if each["method"] == "paper"]
        others = [dense.get(SDPA), min(dense.values(), default=None), min(paper, default=None)]
        stages = {each["stage"]: each["median"] for each in alike if each["method"] == "BPC"}
        speedups = [None if other is None else other / row["median"] for other in others]
        steps.append(row | {"stages": stages, "speedups": speedups})
    return steps


def _step_cells(row: Row) -> list[str]:
    return [f"{row['median'] / 1e3:.2f}", *(_speedup(each, 1) for each in row["speedups"])]


def _speedup(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _section(name: str, result: dict[str, Any]) -> str:
    machine, memory = result["machine"], result["memory_bandwidth"]
    parts = [
        f"## {name.removeprefix('bench_').replace('_', ' ')}",
        f"{link(name)}: `{result['command']}`",
        f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, backend {result['backend']}, commit "
        f"{machine['commit']}; memory {memory['bytes_per_second'] / 1e9:.1f} GB/s ({memory['by']}); "
        f"{result['settings']['dtype']}.",
    ]
    if result.get("layer"):
        parts.append(_layer(result["layer"]))
    if result.get("decode"):
        parts.append(_decode(result["decode"]["rows"]))
    if result.get("prefill"):
        parts.append(_prefill(result["prefill"]["rows"]))
    if result.get("crossover"):
        parts += _crossover(result["crossover"])
    return "\n\n".join(parts)


def _layer(rows: list[Row]) -> str:
    """One line per step of BPC: its stages, and the speedups over the others."""
    lines = []
    for row in _steps(rows):
        stages = [f"{row['stages'][stage]:,.0f}" if stage in row["stages"] else "" for stage in STAGES]
        cells = [row["batch"], row["group"], f"{row['tokens']:,}", f"{row['attended']:,}", *stages]
        lines.append([*cells, f"{100 * row['floor_share']:.0f} %", *map(_speedup, row["speedups"])])
    heads = ["batch", "`G`", "tokens", "attended", *(f"{each}, us" for each in STAGES), "floor / step", *SPEEDUPS]
    return table(heads, lines)


def _decode(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        sides = {"BPC": row["bpc"], "limit: sparse attention takes no time": row["free"]}
        sides |= {f"full attention, {name}": each for name, each in row["dense_forms"].items()}
        for name, side in sides.items():
            if not side.get("milliseconds"):
                continue
            cells = [row["batch"], f"{row['tokens']:,}", f"{row['attended']:,}", name]
            cells += [f"{side['tokens_per_second']:.2f}", f"{side['milliseconds']:.1f}"]
            speedup = _speedup(side["milliseconds"] / row["bpc"]["milliseconds"])
            lines.append([*cells, f"{100 * side['floor_share']:.0f} %", speedup])
    return table(["batch", "tokens", "attended", "", "tokens/s", "ms", "floor / time", "speedup of BPC over it"], lines)


def _prefill(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        cells = [f"{row[side]['median']:.3f}" if side in row else "" for side in ("full", "bpc", "hashing")]
        lines.append([row["what"], f"{row['tokens']:,}", *cells])
    return table(["", "tokens", "full attention, s", "BPC, s", "hashing alone, s"], lines)


def _crossover(found: list[Row]) -> list[str]:
    parts = []
    for each in found:
        lines = []
        for row in each["rows"]:
            own, dense = row["sparse"]["median"], row["dense"]["median"]
            cells = [each["batch"], each["group"], f"{row['tokens']:,}", f"{own:,.0f}", f"{dense:,.0f}"]
            lines.append([*cells, _speedup(dense / own)])
        parts.append(table(["batch", "`G`", "tokens", "BPC, us", "dense, us", "speedup"], lines))
        parts.append(f"So `min_context={each['min_context']}`.")
    return parts


def serving(results: Results) -> str:
    """vLLM's server, stock and with BPC."""
    rows = results["serving"]["rows"]
    names = list(dict.fromkeys(row["server"] for row in rows))
    lines = []
    for row in rows:
        if row["server"] != names[0]:
            continue
        same = [each for each in rows if all(each[key] == row[key] for key in ("prompt", "requests"))]
        speeds = [f"{each['tokens_per_second']:.1f}" for each in same]
        lines.append(
            [f"{row['prompt']:,}", str(row["requests"]), *speeds, *(f"{each['ratio']:.2f}" for each in same[1:])]
        )
    heads = [f"{name}, tokens/s" for name in names] + [f"{name}: ratio" for name in names[1:]]
    return table(["prompt, tokens", "requests", *heads], lines)
