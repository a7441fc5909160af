"""The tables of docs/measurements.md."""

from typing import Any

from markdown_table import Results, percent, table

__all__ = [
    "calibration_plan",
    "calibration_time",
    "fitting_time",
    "key_counts",
    "keys_per_head",
    "needles_made_text",
    "needles_real_text",
    "outlier_needle",
    "shift_made_text",
    "shift_real_text",
    "soak",
    "steady_decode",
]

LABELS = {
    "full attention": "full attention",
    "exact best": "the exact best tokens",
    "by chance": "random tokens",
    "BPC": "BPC",
    "BPC, no gain": "BPC without the gain",
    "BPC, no safeguard": "BPC without the safeguard",
    "BPC online": "BPC online",
    "BPC online, no gain": "BPC online, without the gain",
}


def shift_made_text(results: Results) -> str:
    """Recall with and without the position shift."""
    return _shift(results["position_shift_made_text"])


def shift_real_text(results: Results) -> str:
    """The same on text unlike the training text."""
    return _shift(results["position_shift_real_text"])


def _shift(result: dict[str, Any]) -> str:
    contexts = result["settings"]["contexts"]
    lines = []
    for row in result["rows"]:
        tokens, rest = row["calibrated_on"].split(" ", 1)
        figures = [f"{row['recall_by_context'][str(each)]:.3f}" for each in contexts]
        lines.append([f"{int(tokens):,} {rest}", "on" if row["gain"] else "off", *figures])
    return table(["calibrated on", "gain", *(f"{each:,} tokens" for each in contexts)], lines)


def calibration_time(results: Results) -> str:
    """Seconds of a calibration, by stage."""
    result = results["calibration_time"]["result"]
    stages = result["seconds_by_stage"]
    return table(
        ["", "seconds"],
        [
            ["the bare forward passes", f"{result['bare_forward_seconds']:.1f}"],
            ["`bpc calibrate`, from start to file", f"{result['calibrate_seconds']:.1f}"],
            ["of which starting and reading text", f"{stages['text']:.1f}"],
            ["collecting keys (the forward passes)", f"{stages['keys']:.1f}"],
            ["decomposing", f"{stages['decompose']:.1f}"],
        ],
    )


def needles_made_text(results: Results) -> str:
    """Right answers with and without each part of BPC."""
    return _needles(results["needles_made_text"], list(LABELS))


def needles_real_text(results: Results) -> str:
    """The same, calibrated on text unlike the training text."""
    return _needles(results["needles_real_text"], ["BPC", "BPC, no gain", "BPC, no safeguard"])


def _needles(result: dict[str, Any], methods: list[str]) -> str:
    settings = result["settings"]
    right = {(row["method"], row["budget"]): row["right"] for row in result["rows"]}
    lines = []
    for method in methods:
        everything = right.get((method, 1.0))
        lines.append([LABELS[method], *(right.get((method, budget), everything) for budget in settings["budgets"])])
    heads = [f"{100 * budget:g} % ({int(budget * settings['tokens'])} tokens)" for budget in settings["budgets"]]
    return table(["right answers, of 100", *heads], lines)


def outlier_needle(results: Results) -> str:
    """Right answers by safeguard, bits and gain."""
    rows = [row for row in results["outlier_needle"]["rows"] if "safeguard" in row]
    guards = sorted({row["safeguard"] for row in rows})
    keys = ("gain", "bits", "budget", "safeguard")
    right = {tuple(row[key] for key in keys): row["right"] for row in rows}
    lines = [
        [
            f"{bits} bits{'' if gain else ' without the gain'}, {100 * budget:g} %",
            *(right[gain, bits, budget, guard] for guard in guards),
        ]
        for gain in (False, True)
        for bits in (64, 32)
        for budget in (0.02, 0.005)
    ]
    return table(["right answers, of 100", *(f"safeguard {guard:g}" for guard in guards)], lines)


def steady_decode(results: Results) -> str:
    """Time per token at the beginning and at the end of a long answer."""
    labels = {"BPC, 2 %": "BPC, 2 %, no dense layer"}
    lines = []
    for row in results["steady_decode"]["rows"]:
        times = row["milliseconds_by_block"]
        label = labels.get(row["cache"], row["cache"])
        lines.append([label, f"{times[0]:.1f}", f"{times[-1]:.1f}", f"{row['last_to_first']:.2f}"])
    block = results["steady_decode"]["settings"]["block"]
    return table(["ms per token", f"first {block}", f"last {block}", "last / first"], lines)


def soak(results: Results) -> str:
    """Resident memory in each sixth of an hour of conversations."""
    rows, lines = results["soak"]["rows"], []
    size = len(rows) // 6
    for part in (rows[first : first + size] for first in range(0, 6 * size, size)):
        memory = sorted(row["resident_bytes"] / 2**20 for row in part)
        turns = f"{part[-1]['turns']:,}"
        lines.append([f"{part[-1]['minutes']:.0f}", turns, *(f"{memory[place]:.0f}" for place in (0, size // 2, -1))])
    return table(["until minute", "turns so far", "least MiB", "median", "most"], lines)


def key_counts(results: Results) -> str:
    """Residuals with 64 bits on fitted keys and on others, by keys per head."""
    found = {
        (result["model"], row["keys"]): row
        for result in (results["key_counts_demo"], results["key_counts_real_text"])
        for row in result["rows"]
        if row["bits"] == 64
    }
    models = list(dict.fromkeys(model for model, _ in found))
    both = sorted(set.intersection(*({keys for name, keys in found if name == model} for model in models)))
    lines = []
    for keys in both:
        rows = [found[model, keys] for model in models]
        more = [percent(row["others"] / row["own"] - 1, 0) for row in rows]
        cells = [f"{row['own']:.3f}, {row['others']:.3f} (+{m} %)" for row, m in zip(rows, more, strict=True)]
        lines.append([f"{keys:,}", keys // 64, *cells])
    return table(["keys", "per bit", *(f"{model}: fitted, others" for model in models)], lines)


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
    names = {
        "collect_seconds": ("collecting keys", lambda value: f"{value:.0f} s"),
        "decompose_seconds": ("decomposing", lambda value: f"{value:.0f} s"),
        "memory_bytes": ("memory", lambda value: f"{value / 1e9:.2f} GB"),
        "work_bytes": ("disk", lambda value: f"{value / 1e6:.0f} MB"),
    }
    lines = [
        [title, *(f"{show(row[name]['plan'])}, {show(row[name]['real'])} ({row[name]['ratio']:.2f})" for row in rows)]
        for name, (title, show) in names.items()
    ]
    return table(["", *(f"{row['model']}: forecast, real (ratio)" for row in rows)], lines)


def fitting_time(results: Results) -> str:
    """Seconds to fit a layer, by shape."""
    return table(
        ["KV heads, keys per head, head_dim", "torch", "kernels", "ratio"],
        [
            [
                f"{row['kv_heads']}, {row['keys_per_head']:,}, {row['head_dim']}",
                f"{row['torch_seconds']:.2f} s",
                f"{row['numba_seconds']:.2f} s",
                f"{row['speedup']:.1f}",
            ]
            for row in results["fitting_time"]["rows"]
        ],
    )
