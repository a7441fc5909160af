"""The tables of two trained models, from the results of real_suite.py."""

from collections.abc import Iterator

from report import Lines, Results, Row, by, made_by, percent

from bpc_calib.evaluation.methods import FIGURES, METHODS
from bpc_calib.evaluation.statistics import proportion
from bpc_calib.method.defaults import budget_text

__all__ = ["PARTS", "TABLES"]

PARTS = (
    "calibrate", "quality", "budgets", "others", "methods", "defaults", "shares", "nibbles",
    "answers", "tasks", "generate", "exact",
)  # fmt: skip
LENGTH = 8192  # tokens per prompt of the first table
HEADLINE = ("full", "oracle", "bpc", "bpc-online", "paper", "random")
SHOWN = {name: FIGURES[name] for name in ("loss_difference", "kl", "mass", "cosine")}
LABELS = {"oracle": "the exact best tokens", "paper": "BPC, `--method paper`"}


def models(results: Results, part: str) -> dict[str, Row]:
    """What a part measured, by model; empty if it has not run. Older results have methods that are no more."""
    found = results.get(f"real_{part}", {}).get("models", {})
    known = {*METHODS, "paper", "calibrated", "nibbles", "nibbles-adapted"}
    return {
        model: made | {"rows": [row for row in made.get("rows", []) if row.get("method", "bpc") in known]}
        for model, made in found.items()
    }


def rows_of(results: Results, part: str, model: str) -> list[Row]:
    """The rows of a model in a part; none if it has not run."""
    return models(results, part).get(model, {"rows": []})["rows"]


def on_text(results: Results) -> dict[str, list[Row]]:
    """The rows on text of the parts `quality`, `budgets` and `others`, by model."""
    parts = ("quality", "budgets", "others")
    return {
        model: [row for part in parts for row in rows_of(results, part, model)] for model in models(results, "quality")
    }


def label(method: str) -> str:
    return LABELS.get(method) or METHODS[method].label


def short(results: Results) -> Lines:
    """What a user of `bpc generate` pays and gets: loss, bytes and speed with its default settings."""
    heads = ["model", "prompt, tokens", "projections", "KV bytes read", "loss", "KL", "transformers, tokens/s"]
    yield *heads, "BPC, tokens/s", "speedup", "with full attention instead"
    for model, found in models(results, "generate").items():
        losses = [row for row in rows_of(results, "defaults", model) if row["needs"] and row["method"] == "bpc"]
        for row in found["rows"]:
            prompt, calibrated = row["prompt_tokens"], row["projections"] == "calibrated"
            if row["tokens"] < 2 or not calibrated:
                continue
            # The evaluated lengths include the forced tokens; the prompt leaves room for the new ones.
            near = [each for each in losses if row["kv_bytes_share"] < 1 and 0.85 < prompt / each["tokens"] <= 1]
            lost = [spread(near[0][name]) if near else "" for name in ("loss_difference", "kl")]
            full, ours, _ = _speeds(row)
            plain = row["plain"]
            share = f"{percent(row['kv_bytes_share'], 0)} %"
            theirs = _speeds(plain)[0]
            yield model, prompt, row["projections"], share, *lost, theirs, ours, f"{_gain(row, plain):.2f}", full
            model = ""


def headline(results: Results) -> Lines:
    """Both models at the main budget, with code and prose together."""
    yield "model", "method", "KV read", *SHOWN.values()
    for model, found in on_text(results).items():
        length = max(row["tokens"] for row in found if row["tokens"] <= LENGTH)
        rows = [row for row in found if row["tokens"] == length]
        main = float(max((row for row in rows if row["budget"]), key=lambda row: row["forced"])["budget"])
        least = min(row["budget"] for row in rows if row["budget"])
        rows.sort(key=lambda row: row["forced"])  # those with the most forced tokens replace the others
        first = by((row for row in rows if row["budget"] in (main, None)), "method")
        for method in (name for name in HEADLINE if name in first):
            yield model, label(method), *_figures(first[method])
            model = ""
        last = next(row for row in rows if row["method"] == "bpc" and row["budget"] == least)
        yield "", f"BPC, {budget_text(least)} attended", *_figures(last)


def lengths(results: Results) -> Lines:
    """KL by model, length and budget, of the exact best tokens and of BPC."""
    yield "model", "tokens", "budget", "forced", "KL: exact best", "KL: BPC"
    for model, found in on_text(results).items():
        own = by((row for row in found if row["budget"]), "tokens", "budget", "method")
        for tokens, budget in sorted(
            {(tokens, budget) for tokens, budget, _ in own}, key=lambda place: (place[0], -place[1])
        ):
            best, ours = (own[tokens, budget, name] for name in ("oracle", "bpc"))
            yield model, tokens, budget_text(budget), best["forced"], spread(best["kl"]), spread(ours["kl"])
            model = ""


def methods(results: Results) -> Lines:
    """All methods of `bpc eval` at the least budget: what each learns beforehand, and its figures by length."""
    found = models(results, "methods")
    lengths = sorted({row["tokens"] for each in found.values() for row in each["rows"]})
    heads = [f"{tokens:,}: {name}" for tokens in lengths for name in ("KV read", "KL", "right, %")]
    yield "model", "method", "learned, s", *heads
    for model, made in found.items():
        seconds = made.get("learned", {}).get("seconds", {})
        least = min(row["budget"] for row in made["rows"] if row["budget"])
        rows = [row for row in made["rows"] if row["budget"] in (least, None)]
        for name in sorted({row["method"] for row in rows}, key=list(METHODS).index):
            cells = [cell for tokens in lengths for cell in _at(rows, name, tokens)]
            yield model, label(name), f"{seconds[name]:.0f}" if name in seconds else "", *cells
            model = ""


def _at(rows: list[Row], method: str, tokens: int) -> Iterator[str]:
    """What a method reads at a length, its KL, and how many of all questions it answers."""
    text, *asked = sorted(
        (row for row in rows if (row["method"], row["tokens"]) == (method, tokens)), key=lambda row: "score" in row
    )
    yield from (f"{percent(text['read'])} %", spread(text["kl"]))
    right = sum(round(row["score"]["value"] * row["prompts"]) for row in asked)
    value, low, high = (percent(share, 0) for share in proportion(right, sum(row["prompts"] for row in asked)).values())
    yield f"{value} ({low} to {high})"


def defaults(results: Results) -> Lines:
    """What a step reads and loses as `bpc generate` decodes, with needs and without them."""
    heads = ["model", "tokens", "method", "with needs: KV read", "loss", "KL", "without: KV read", "loss", "KL"]
    yield tuple(heads)
    for model, found in models(results, "defaults").items():
        own = by(found["rows"], "tokens", "method", "needs")
        for tokens, name in dict.fromkeys((tokens, name) for tokens, name, _ in own if name in ("oracle", "bpc")):
            pair = (own[tokens, name, needs] for needs in (True, False))
            yield model, tokens, label(name), *(cell for row in pair for cell in _figures(row)[:3])
            model = ""


def shares(results: Results) -> Lines:
    """KL with shares by head and with equal shares, of the exact best tokens and of BPC."""
    heads = (f"{who}, {how}" for who in ("exact best", "BPC") for how in ("equal", "by head"))
    yield "model", "tokens", "budget", *heads, "by head, not adapted"
    kinds = [("oracle", True), ("oracle", False), ("bpc", True), ("bpc", False), ("calibrated", False)]
    for model, found in models(results, "shares").items():
        todays = (row for row in found["rows"] if not row["below_best"])
        own = by(todays, "tokens", "budget", "method", "equal_shares")
        for tokens, budget in sorted({place[:2] for place in own}, key=lambda at: (at[0], -at[1])):
            rows = [own[tokens, budget, method, equal] for method, equal in kinds]
            yield model, tokens, budget_text(budget), *(spread(row["kl"]) for row in rows)
            model = ""


def kinds(results: Results) -> Lines:
    """KL with shares by head of the exact best tokens, and of signs and nibbles, as calibrated and adapted."""
    named = {
        "exact best": "oracle", "signs": "calibrated", "signs, adapted": "bpc", "nibbles": "nibbles",
        "nibbles, adapted": "nibbles-adapted",
    }  # fmt: skip
    yield "model", "tokens", "budget", *named
    for model, found in models(results, "nibbles").items():
        own = by(found["rows"], "tokens", "budget", "below_best", "method", "equal_shares")
        for tokens, budget in sorted({place[:2] for place in own}, key=lambda at: (at[0], -at[1])):
            rows = (own.get((tokens, budget, False, method, False)) for method in named.values())
            yield model, tokens, budget_text(budget), *(spread(row["kl"]) if row else "not measured" for row in rows)
            model = ""


def answers(results: Results) -> Lines:
    """Right answers with shares by head and with equal shares, and with nibbles."""
    found = models(results, "answers")
    budgets = sorted({row["budget"] for made in found.values() for row in made["rows"] if row["budget"]}, reverse=True)
    yield "model", "task", "full attention", "codes", *(f"at {budget_text(each)}" for each in budgets)
    names = {("bpc", True): "signs, equal shares", ("bpc", False): "signs", ("nibbles", False): "nibbles"}
    for model, made in found.items():
        own = by(made["rows"], "task", "budget", "method", "equal_shares")
        full = {row["task"]: _score(row) for row in made["rows"] if row["method"] == "full"}
        for task, score in full.items():
            where = model, task, score
            for (method, equal), name in names.items():
                rows = [own.get((task, each, method, equal)) for each in budgets]
                if any(rows):
                    yield *where, name, *("" if row is None else _score(row) for row in rows)
                    model, where = "", ("", "", "")


def tasks(results: Results) -> Lines:
    """Right answers to the questions that full attention can answer."""
    measured = {row["method"] for found in models(results, "tasks").values() for row in found["rows"]}
    names = [name for name in HEADLINE if name in measured]
    yield "model", "task", "prompts", *map(label, names)
    for model, found in models(results, "tasks").items():
        own = by(found["rows"], "task", "tokens", "method")
        for task, tokens in dict.fromkeys((task, tokens) for task, tokens, _ in own):
            rows = [own[task, tokens, name] for name in names]
            yield model, task, rows[0]["prompts"], *map(_score, rows)


def generate(results: Results, part: str = "generate") -> Lines:
    """What `bpc generate --compare` prints, with compiled and with plain layers."""
    yield (
        "model", "tokens", "projections", "KV read", "plain layers: full attention, tokens/s", "BPC", "speedup",
        "compiled layers: full attention", "BPC", "speedup", "with the prompt",
        "BPC over transformers",
    )  # fmt: skip
    for model, found in models(results, part).items():
        for row in found["rows"]:
            plain = row["plain"]
            share = "" if row["kv_bytes_share"] is None else f"{percent(row['kv_bytes_share'])} %"
            whole, most = _seconds(row["full_attention"], prompt=True) / _seconds(row, prompt=True), _gain(row, plain)
            yield (
                model, row["prompt_tokens"], row["projections"], share, *_speeds(plain), *_speeds(row), f"{whole:.2f}",
                f"{most:.2f}",
            )  # fmt: skip
            model = ""


def generate_avx512(results: Results) -> Lines:
    """What `generate` measured on a machine with AVX-512 and without AMX."""
    yield from generate(results, "generate_avx512")


def exact(results: Results) -> Lines:
    """How many drafted tokens full attention chooses too at 2 %, and tokens per second with and without drafts."""
    yield (
        "model", "text", "tokens", "drafted tokens that are right", "full attention, tokens/s", "BPC",
        "exact, 4 drafted", "expected", "exact, adaptive",
    )  # fmt: skip
    for model, found in models(results, "exact").items():
        largest = max(row["budget"] for row in found["rows"])  # 2 %
        for row in (row for row in found["rows"] if row["budget"] == largest):
            right, taken = f"{percent(row['right'] / row['checked'])} % of {row['checked']}", row["tokens_per_second"]
            # A sparse step and a quarter of a dense one for each token.
            expected = {"expected": 1 / (1 / taken["bpc"] + 1 / taken["full"] / 4)}
            names = "full", "bpc", "exact", "expected", "adaptive"
            speeds = (f"{(taken | expected)[name]:.1f}" for name in names)
            yield model, row["corpus"], row["tokens"] + row["new"], right, *speeds
            model = ""


def files(results: Results) -> Lines:
    """The parts, how long they took, and their files."""
    yield "part", "minutes", "file"
    for part in PARTS:
        if found := models(results, part):
            minutes = sum(each["seconds"] for each in found.values()) / 60
            yield f"`{part}`", f"{minutes:.0f}", f"[real_{part}.json](../benchmarks/results/real_{part}.json)"


TABLES = made_by(
    short, headline, lengths, methods, defaults, shares, kinds, answers, tasks, generate, generate_avx512, exact,
    files, prefix="real-",
)  # fmt: skip


def spread(figure: dict[str, float]) -> str:
    """A value and half its 95 % interval."""
    return f"{figure['value']:.3f} ± {(figure['high'] - figure['low']) / 2:.3f}"


def _speeds(row: Row) -> tuple[str, ...]:
    """Tokens per second of full attention and of BPC, and the ratio of their work behind the prefill, with hashing."""
    ours, theirs = row, row["full_attention"]
    speeds = (f"{run['tokens_per_second'] or 0:.1f}" for run in (theirs, ours))
    return *speeds, f"{_seconds(theirs) / _seconds(ours):.2f}"


def _seconds(run: Row, prompt: bool = False) -> float:
    """Seconds per new token; with the prompt's own."""
    parts = ("prepare_seconds", "decode_seconds", *(["prefill_seconds"] if prompt else []))
    return sum(run[part] for part in parts) / max(1, run["tokens"] - 1)


def _gain(row: Row, plain: Row) -> float:
    """How many times faster BPC with compiled layers is than transformers' own full attention."""
    return _seconds(plain["full_attention"]) / _seconds(row)


def _score(row: Row) -> str:
    value, low, high = (percent(row["score"][side], 0) for side in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _figures(row: Row) -> list[str]:
    """The share of the bytes that are read, and what is compared with full attention."""
    return [f"{percent(row['read'])} %", *(spread(row[name]) if name in row else "" for name in SHOWN)]
